"""bench/compare.py with the small model on our side and a made-up vLLM on the other: what it runs, counts and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import compare
from simplellm.bench.inter import Inter, run, summarise
from simplellm.bench.work import Meter, draw_ids
from simplellm.config import EngineConfig
from simplellm.engine.start import start
from simplellm.errors import EngineError, OptionError

ROOT = Path(__file__).resolve().parent.parent
OURS = {"device": "cpu", "max_running": 8, "num_pages": 64, "max_context": 1024}

VLLM = '''
import time
from types import SimpleNamespace as Box

__version__ = "0.made.up"
SamplingParams = Box


class Engine:
    """A token for each request a step; a step takes 2 ms for each `slow`."""

    def __init__(self, slow):
        self.slow, self.open = slow, {}

    def add_request(self, name, prompt, params):
        assert params.temperature == 0 and params.ignore_eos and not params.detokenize and name not in self.open
        self.open[name] = Box(request_id=name, left=params.max_tokens, outputs=[Box(token_ids=[])], finished=False)
        assert all(0 <= token < 199_000 for token in prompt["prompt_token_ids"])

    def abort_request(self, names):
        for name in names:
            del self.open[name]

    def has_unfinished_requests(self):
        return bool(self.open)

    def step(self):
        time.sleep(0.002 * self.slow)
        for one in list(self.open.values()):
            one.outputs[0].token_ids.append(7)
            one.finished = len(one.outputs[0].token_ids) == one.left
        done = list(self.open.values())
        self.open = {one.request_id: one for one in done if not one.finished}
        return done


class LLM:
    def __init__(self, model, slow=1, **options):
        assert options["max_model_len"] == 1024 and not options["enable_prefix_caching"]
        self.llm_engine = Engine(slow)
'''


@pytest.mark.parametrize("how", [[], ["--sequential"]], ids=["in turns", "sequential"])
def test_one_call_measures_works_prompts_and_gaps_of_every_setting(how: list[str], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    works = ["--work", "2x9x5", "--prompt", "40", "--inter", "2x8+3x30@50"]
    settings = [part for slow in (1, 3) for part in ("--vllm", json.dumps({"max_model_len": 1024, "slow": slow}))]
    command = [sys.executable, "bench/compare.py", str(tiny), *works, *settings, "--ours", json.dumps(OURS)]
    command += ["--passes", "2", "--out", str(tmp_path / "out.json"), *how]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert record == json.loads(done.stdout.splitlines()[-1])
    engines = record["engines"]
    assert engines.keys() == {"simplellm", "vllm-1", "vllm-2"} and engines["vllm-2"]["options"]["slow"] == 3
    assert engines["simplellm"]["options"]["num_pages"] == 64 and engines["simplellm"]["options"]["token_budget"] == 2048
    by = {(row["work"], row["engine"]): row for row in record["rows"]}
    assert by.keys() == {(work, name) for work in ("2x9x5", "1x40x1", "2x8+3x30@50") for name in engines}
    assert all(len(row["passes"]) == 2 and row["agreed"] is False for row in by.values())
    work = by["2x9x5", "vllm-2"]
    assert work["decode"] == pytest.approx(2 * 4 / (work["end"] - work["first"]), rel=0.05)  # the seed's formula
    assert 0.006 <= by["1x40x1", "vllm-2"]["last_first"] < 1
    gaps = by["2x8+3x30@50", "vllm-2"]
    assert 0.006 <= gaps["between_p50"] <= gaps["between_p99"] <= gaps["between_max"] and gaps["prompts"] < 50 * 1.5 + 1
    told = {(line["work"], line["figure"]): line for line in record["table"]}
    assert told["2x9x5", "steady"]["by"] == "vllm-1" == told["2x8+3x30@50", "between_p50"]["by"]
    line = told["2x8+3x30@50", "between_p99"]
    assert line["ratio"] == pytest.approx(line["simplellm"] / line["vllm"], rel=0.01)
    assert ("1x40x1", "steady") not in told and ("1x40x1", "last_first") in told


def figures(**values: float) -> dict[str, float]:
    return {"overall": 100.0, "last_first": 1.0, **values}


def test_passes_go_on_until_three_agree_and_the_median_counts() -> None:
    class Made:
        name = "simplellm"

        def __init__(self, rates: list[float]):
            self.rates = iter(rates)

        def run(self, work: str, seed: int) -> dict[str, float]:
            return figures(overall=next(self.rates))

    (row,) = compare.measure([Made([50, 100, 103, 101, 999])], "1x1x1", 6)  # type: ignore[list-item]
    assert row["agreed"] and row["overall"] == 101 and [one["overall"] for one in row["passes"]] == [50, 100, 103, 101]
    (row,) = compare.measure([Made([50, 100, 104, 101])], "1x1x1", 4)  # type: ignore[list-item]
    assert not row["agreed"] and row["overall"] == 101
    gaps = [{"between_p50": 1.0, "between_p99": 5.0}, {"between_p50": 1.01, "between_p99": 9.0}]
    assert compare.agree([gaps[0], *gaps]) and not compare.agree(gaps)


def test_the_table_takes_the_better_setting_for_each_figure() -> None:
    base = {"work": "w", "agreed": True}
    rows = [base | {"engine": "simplellm", "steady": 300.0, "last_first": 1.0, "decode": 0.0}]
    rows += [base | {"engine": "vllm-1", "steady": 200.0, "last_first": 4.0, "decode": 0.0}]
    rows += [base | {"engine": "vllm-2", "steady": 100.0, "last_first": 2.0, "decode": 0.0, "agreed": False}]
    steady, first = compare.tabulate(rows)
    assert (steady["ratio"], steady["by"], steady["agreed"]) == (1.5, "vllm-1", True)
    assert (first["ratio"], first["by"], first["agreed"]) == (0.5, "vllm-2", False)
    assert compare.tabulate(rows[1:]) == [] == compare.tabulate(rows[:1])


@pytest.mark.parametrize("args", [["m"], ["m", "--work", "1x1x1", "--passes", "0"]])
def test_nothing_to_measure(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(args)
    assert "nothing to measure" in capsys.readouterr().err


# The load of running decodes and arriving prompts


@pytest.mark.parametrize("text", ["32x1024+40x8192@2.5", "1x1+1x1@20"])
def test_a_load_is_read_as_it_is_written(text: str) -> None:
    assert str(Inter.parse(text)) == text


@pytest.mark.parametrize("text", ["", "32x1024", "32x1024+8192@2", "0x1+1x1@1", "1x1+1x1@0", "1x1+1x1@x", "1x1+1x1@-1"])
def test_a_load_that_means_nothing(text: str) -> None:
    with pytest.raises(OptionError, match="inter:.*as 32x1024"):
        Inter.parse(text)


def test_every_engine_gets_the_same_prompts_which_differ_from_pass_to_pass() -> None:
    load = Inter.parse("2x8+3x30@50")
    running, arriving = load.draw(300, 1)
    assert [len(ids) for ids in running + arriving] == [8, 8, 30, 30, 30] and running == draw_ids(2, 8, 300, 1)
    assert load.draw(300, 1) == (running, arriving) and load.draw(300, 2)[1] != arriving
    assert arriving[0][:8] != running[0] and max(map(max, arriving)) < 300


def test_gaps_count_while_prompts_arrive_and_waits_from_when_they_are_due() -> None:
    load = Inter.parse("2x8+2x30@2")  # due at 100 and 100.5
    even = [99.0, 99.9, 100.0, 100.1, 100.2, 100.3, 101.0, 102.0]
    found = summarise(load, 100.0, [even, [100.0, 100.5, 100.5, 101.0]], [100.2, 101.0])
    assert found["between_p50"] == pytest.approx(0.3) and found["between_max"] == pytest.approx(0.7)  # .1 .1 .1 .5 .5 .7
    assert found["decode"] == 9 and found["prompts"] == 2
    assert found["first_p50"] == pytest.approx(0.35)
    with pytest.raises(EngineError, match="no sequence had two tokens"):
        summarise(load, 100.0, [[99.0], [103.0]], [100.2, 101.0])


def test_our_side_of_the_load(tiny: Path) -> None:
    def with_engine(do: Callable[[Meter], Any], **options: Any) -> Any:
        engine = start(tiny, EngineConfig(progress=False, prefix_cache=False, **(OURS | options)), frozenset())
        try:
            return do(Meter(engine))
        finally:
            engine.close()

    def twice(meter: Meter) -> None:
        for seed in (1, 2):
            found = run(meter, Inter.parse("2x8+3x200@20"), seed)
            assert found["between_p99"] > 0 and found["prompts"] > 0 and found["first_p50"] > 0
        assert not meter.engine.scheduler.requests and meter.engine.worker.loop.idle

    with_engine(twice)
    with pytest.raises(EngineError, match=r"2x8\+3x30@2: a sequence ended too early: length"):
        with_engine(lambda meter: run(meter, Inter.parse("2x8+3x30@2"), 1), max_context=60)
    with pytest.raises(OptionError, match="leaves no room"):
        with_engine(lambda meter: run(meter, Inter.parse("2x8+3x60@2"), 1), max_context=60)
