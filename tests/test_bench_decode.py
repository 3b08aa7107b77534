"""`simplellm bench decode` and `bench prefill`: the floor's bytes, the table of kernels, and what the JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from simplellm.bench import decode
from simplellm.bench.floor import op_bytes, step_bytes
from simplellm.bench.profile import show, tabulate
from simplellm.bench.work import Work
from simplellm.cli import main
from simplellm.config import ModelConfig
from simplellm.model.checkpoint import load_config
from tools.make_checkpoint import hf_config, write_json


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Of the 20b, but with two full layers in three."""
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 8
    write_json(tmp_path / "config.json", hf_config(24, 32) | {"layer_types": kinds})
    return load_config(tmp_path)


def test_a_step_reads_all_keys_in_full_layers_and_a_window_in_the_others(config: ModelConfig) -> None:
    ops = op_bytes(config, 64, 1000)
    assert ops["attention_full"] == 64 * 1000 * 2 * 8 * 64 * 2 and ops["attention_window"] == 64 * 128 * 2 * 8 * 64 * 2
    assert op_bytes(config, 64, 100)["attention_window"] == op_bytes(config, 64, 100)["attention_full"]
    longer = step_bytes(config, 64, 2000) - step_bytes(config, 64, 1000)
    assert longer == pytest.approx(16 * 64 * 1000 * 2 * 8 * 64 * 2)
    alone = step_bytes(config, 1, 1000)
    assert 3.5e9 < alone < 4e9  # 20b: what one token's experts, the dense weights and lm_head are


def test_the_table_charges_each_kernel_its_own_bytes(config: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["embed_kernel", "attention_full", "attention_window", "router_logits", "experts_down", "attention_chunk_full"]
    events = [{"name": name, "ts": 10.0 * i, "dur": 10.0} for i, name in enumerate(["before", *names])]
    show(tabulate(events), config, 64, 1000)
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    ops = op_bytes(config, 64, 1000)
    wanted = {name: ops[name] for name in ("attention_full", "attention_window")}
    wanted |= {"router_logits": ops["router"], "experts_down": ops["down"]}
    for name, size in wanted.items():
        assert float(lines[name][4]) == pytest.approx(size / 1e6, abs=0.06)
        assert float(lines[name][5]) == pytest.approx(size / 10e-6 / 1e12, abs=0.006)  # in 10 us
    assert len(lines["attention_chunk_full"]) == len(lines["embed_kernel"]) == 5  # of these no bytes are known


@pytest.mark.parametrize("kind", [["decode", "--work", "2x5x4"], ["prefill", "--prompt", "9"]], ids=["decode", "prefill"])
def test_the_record_has_every_option(kind: list[str], tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--max-running", "4", "--token-budget", "64", "--memory-gb", "1", "--passes", "2"]
    assert main(["bench", *kind, "--model", str(tiny), *options]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    told = record["options"]
    assert (told["device"], told["max_running"], told["token_budget"], told["memory_gb"]) == ("cpu", 4, 64, 1.0)
    assert told["prefix_cache"] is False and told["num_pages"] > 8 and told["max_context"] == load_config(tiny).max_context
    assert "card" not in record and record.get("read_bandwidth") is None


def test_the_bandwidth_is_that_of_the_engines_device(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of whichever GPU comes first."""
    second, asked = torch.device("cuda:1"), []
    monkeypatch.setattr(decode, "pick_device", lambda name: second if name == "cuda:1" else torch.device("cpu"))
    monkeypatch.setattr(decode, "read_bandwidth", lambda device: asked.append(device) or 1e12)
    monkeypatch.setattr(decode, "start", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    for name in ("cuda:1", "cpu"):
        with pytest.raises(KeyboardInterrupt):
            decode.bench_decode(tiny, [Work(1, 1, 1)], {"device": name}, 1, False)
    assert asked == [second]
