"""The GPU engine: layers of full size against the float32 twin, graphs against the same kernels launched one by one, the small
model's tokens against the CPU's, and nothing allocated after the start."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from simplellm import LLM, kernels
from simplellm.api import BUILTIN
from simplellm.config import EngineConfig, ModelConfig
from simplellm.kernels import Spans
from simplellm.model.checkpoint import load_config
from simplellm.model.gpt_oss import Batch, GptOss
from simplellm.model.layers import arrange
from simplellm.model.weights import LayerWeights, Weights, list_sources, load_weights
from simplellm.request import PageUpdate, Plan, RowStart, Sampling, Span
from tools.make_checkpoint import hf_config, write_json

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    from simplellm.engine import gpu_runner
    from simplellm.engine.gpu_runner import GpuRunner

GPU = torch.device("cuda")


def full_size(folder: Path, experts: int, vocab: int = 2048) -> ModelConfig:
    """Two layers of the 20b or 120b, with a small vocabulary."""
    write_json(folder / "config.json", hf_config(2, experts, vocab_size=vocab, eos_token_id=None))
    return load_config(folder)


def random_layers(config: ModelConfig) -> tuple[dict[str, torch.Tensor], list[LayerWeights]]:
    """Values of a trained model's size, drawn on the GPU."""
    g = torch.Generator(GPU).manual_seed(0)
    fields: dict[int | None, dict[str, torch.Tensor]] = {}
    for source in list_sources(config):
        if source.field.endswith("_blocks"):
            tensor = torch.randint(0, 256, source.shape, dtype=torch.uint8, device=GPU, generator=g)
        elif source.field.endswith("_scales"):
            tensor = torch.randint(118, 121, source.shape, dtype=torch.uint8, device=GPU, generator=g)
        else:
            std = {"embed": 1.0, "sinks": 1.0}.get(source.field, 0.02 if source.field.endswith("_w") else 0.1)
            tensor = (torch.randn(source.shape, device=GPU, generator=g) * std).to(torch.bfloat16)
            tensor += 1 if source.field.endswith("norm") else 0
        fields.setdefault(source.layer, {})[source.field] = tensor
    return fields[None], [LayerWeights(**fields[i]) for i in range(config.num_layers)]


def new_model(config: ModelConfig, dtype: torch.dtype, twin: bool, max_context: int = 4096) -> GptOss:
    """The kernels' model, or the twins' in either dtype, of the same weights."""
    whole, layers = random_layers(config)
    arranged = [arrange(layer, torch.float32 if twin else dtype) for layer in layers]
    return GptOss(config, Weights(layers=arranged, num_bytes=0, **whole), dtype, max_context)


class TwinRunner:
    """The same plans through the twins, whatever dtype: a page table like the runner's, no graphs."""

    def __init__(self, model: GptOss, num_pages: int, num_rows: int):
        self.model, self.kv = model, model.new_kv(num_pages).zero_()
        self.tables = torch.zeros(2, num_rows, 64, dtype=torch.int32, device=GPU)

    def hidden(self, spans: list[Span], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        lengths = [len(span.tokens) for span in spans]
        batch = Batch(
            tokens=torch.tensor([t for span in spans for t in span.tokens], device=GPU),
            newest=torch.zeros(self.tables.shape[1], dtype=torch.int32, device=GPU),
            spans=Spans(
                rows=torch.tensor([span.row for span in spans for _ in span.tokens], device=GPU),
                positions=torch.tensor([p for span in spans for p in range(span.start, span.end)], device=GPU),
                offsets=torch.tensor([0, *lengths], device=GPU).cumsum(0),
            ),
            full_pages=self.tables[0],
            window_pages=self.tables[1],
            outputs=torch.tensor(lengths, device=GPU).cumsum(0) - 1,
        )
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "on_hopper", lambda device, dtype: False)
            return self.model.body(batch, self.kv)


def page_updates(num_rows: int, pages_each: int) -> tuple[PageUpdate, ...]:
    """Scattered pages for every row, 1 .. 2 num_rows pages_each, in both tables."""
    order = (torch.randperm(2 * num_rows * pages_each, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    places = [(row, window, i) for row in range(num_rows) for window in (False, True) for i in range(pages_each)]
    return tuple(PageUpdate(row, window, i, page) for (row, window, i), page in zip(places, order, strict=True))


def twin_tables(updates: tuple[PageUpdate, ...], tables: torch.Tensor) -> None:
    for update in updates:
        tables[int(update.window), update.row, update.index] = update.page


@contextmanager
def apart(runner: GpuRunner) -> Iterator[None]:
    """Bodies and heads are launched apart, whatever the step."""
    wholes, runner.wholes = runner.wholes, {}
    yield
    runner.wholes = wholes


def settle(runner: GpuRunner, plan: Plan) -> torch.Tensor:
    """Run a plan, body and head apart; the hidden states of its outputs."""
    with apart(runner):
        pending = runner.body(plan)
    hidden = runner.hidden[: len(pending.drawing)].clone()
    runner.head(pending)
    runner.results(pending)
    return hidden


def starts(rows: range) -> tuple[RowStart, ...]:
    return tuple(RowStart(row, Sampling(temperature=0.0), 0, 1, (), None, frozenset()) for row in rows)


@pytest.mark.parametrize("experts", [32, 128])
def test_layers_of_full_size_against_the_float32_twin(tmp_path: Path, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts across pages and the window, then mixed steps and decodes of several sizes: errors like plain bf16's."""
    config = full_size(tmp_path, experts)
    num_rows, pages = 24, 3
    runner = GpuRunner(
        new_model(config, torch.bfloat16, False),
        2 * num_rows * pages + 1,
        EngineConfig(max_running=num_rows, token_budget=4096),
        384,
    )
    runner.kv[:, :, 1:] = torch.nan
    twins = [
        TwinRunner(new_model(config, dtype, True), 2 * num_rows * pages + 1, num_rows)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    updates = page_updates(num_rows, pages)
    for twin in twins:
        twin_tables(updates, twin.tables)
    g = torch.Generator().manual_seed(2)
    done = [0] * num_rows

    def span(row: int, num: int) -> Span:
        tokens = tuple(torch.randint(0, config.vocab_size, (num,), generator=g).tolist())
        done[row] += num
        return Span(row, row, done[row] - num, tokens, True)

    steps = [
        [span(0, 300), span(1, 127), span(2, 128), span(3, 129)],
        [span(0, 1), span(4, 40)],
        [span(row, 1) for row in range(4)],
    ]
    steps += [[span(row, 2 + 9 * row) for row in range(4, num_rows)], [span(row, 1) for row in range(num_rows)], [span(0, 1)]]
    for i, spans in enumerate(steps):
        first = i == 0
        plan = Plan(i, tuple(spans), starts(range(num_rows)) if first else (), updates if first else ())
        ordered = sorted(spans, key=lambda s: len(s.tokens) > 1)
        got, want, plain = settle(runner, plan), *(twin.hidden(ordered, monkeypatch) for twin in twins)
        assert not got.isnan().any()
        errors = [((x.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)).median() for x in (got, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (i, errors)


@pytest.fixture(scope="module")
def small() -> GpuRunner:
    config = load_config(BUILTIN)
    weights = load_weights(BUILTIN, config, GPU, False, lambda layer: arrange(layer, torch.bfloat16))
    runner = GpuRunner(GptOss(config, weights, torch.bfloat16, 1024), 4100, EngineConfig(), 1024)
    runner.kv.zero_()  # the test's decodes read keys that nobody wrote
    runner.body(Plan(0, (Span(0, 0, 0, (1,), False),), starts(range(1024)), page_updates(1024, 2)))
    return runner


def test_a_graph_gives_what_its_kernels_give(small: GpuRunner) -> None:
    """At each size, one above and one below: the graph's hidden states equal those of the same launches, to the bit."""
    sizes = sorted({n + d for n, _ in small.bodies for d in (-1, 0, 1) if 0 < n + d <= gpu_runner.MIXED_SIZES[-1]})
    for n in sizes:
        for chunk in (False, True):
            if n > 1024 and not chunk or n < 2 and chunk:
                continue
            spans = (Span(0, 0, 0, tuple(range(n)) if n <= 256 else tuple(range(256)), True),) if chunk else ()
            rest = n - (len(spans[0].tokens) if spans else 0)
            spans += tuple(Span(row, row, row % 250, (row % 1000,), True) for row in range(1, 1 + min(rest, 1023)))
            plan = Plan(1, spans)
            graph = settle(small, plan)
            size = small._pick(plan.num_tokens, chunk)
            assert size is not None
            again = small._run_layers(small.bodies[size][0])  # of the step that is still there
            assert torch.equal(graph, again[: len(graph)]), (n, chunk)


def drawn(runner: GpuRunner, plans: list[Plan], lag: int, between: dict[int, tuple[dict[int, bytes], frozenset[int]]]) -> list:
    """Every plan's tokens by rid, with up to `lag` later ones on their way; between: masks and skipped rids, by step."""
    runner.kv.zero_(), runner.newest.zero_()
    flying, tokens = [], []
    for i, plan in enumerate(plans):
        flying.append(runner.body(plan))
        runner.head(flying[-1], *between.get(i, ({}, frozenset())))
        tokens += [runner.results(flying.pop(0)).tokens] if len(flying) > lag else []
    return tokens + [runner.results(pending).tokens for pending in flying]


def random_starts(rows: range) -> tuple[RowStart, ...]:
    return tuple(RowStart(row, Sampling(temperature=1.0), 50 + row, 1, (), None, frozenset()) for row in rows)


def test_body_and_head_in_one_graph_draw_what_they_draw_apart(small: GpuRunner) -> None:
    """At each size, one above and one below: two steps of random draws, the second one from the tokens of the first."""
    sizes = sorted({n + d for n in small.wholes for d in (-1, 0, 1) if n + d > 0})
    assert sizes[-1] == gpu_runner.HEAD_ROWS + 1
    for n in sizes:
        plans = [
            Plan(i, tuple(Span(row, row, row % 120 + i, (-1 if i else row,), True) for row in range(n)), starts)
            for i, starts in enumerate((random_starts(range(n)), ()))
        ]
        together, newest = drawn(small, plans, 1, {}), small.newest.clone()
        with apart(small):
            assert drawn(small, plans, 0, {}) == together, n
        assert torch.equal(newest, small.newest) and [len(tokens) for tokens in together] == [n, n]


def test_slots_are_used_again_and_again(small: GpuRunner) -> None:
    """300 steps with lag 1, of changing sizes, masks and skipped rows for a while: as without overlap, body and head apart."""
    launched = []
    for size, run in small.wholes.items():
        small.wholes[size] = lambda run=run, size=size: (launched.append(size), run())
    some = bytes([0b10010001]) * (small.model.config.vocab_size // 8)
    between = {i: ({row: some for row in range(i % 3)}, frozenset({5} if i % 4 else ())) for i in range(140, 160)}
    plans = []
    for i in range(300):
        rows = range(6) if 140 <= i < 160 else range(1 + i * 7 % 9)
        starts = random_starts(range(9)) if i in (0, 160) else ()
        spans = tuple(Span(row, row, i % 250, (row + i if i in (0, 160) else -1,), True) for row in rows)
        plans.append(Plan(i, spans, starts))
    together = drawn(small, plans, 1, between)
    assert len(launched) == 280 and set(launched) == {1, 2, 4, 8, 16}
    with apart(small):
        assert drawn(small, plans, 0, between) == together
    assert all(5 not in together[i] for i in range(140, 160) if i % 4) and 5 in together[140]
    assert all(
        token % 8 in (0, 4, 7) for i, (masks, _) in between.items() for row, token in together[i].items() if row in masks
    )


def test_tokens_of_the_small_model_equal_the_cpus(tiny: Path) -> None:
    """Greedy: where they first differ, the CPU's two best logits are within 0.05 of each other."""
    prompts = [f"What is {a} + {b}?" for a, b in ((12, 30), (478, 256), (9, 9))] + [[5, 6, 7], list(range(3, 400))]
    runs = {}
    for device in ("cpu", "cuda"):
        with LLM(device=device, num_pages=256, progress=False) as llm:
            runs[device] = llm.generate(prompts, max_tokens=48, temperature=0.0, logprobs=True, top_logprobs=2).result()
    for cpu, gpu in zip(runs["cpu"], runs["cuda"], strict=True):
        for i, (a, b) in enumerate(zip(cpu.token_ids, gpu.token_ids, strict=False)):
            if a != b:
                top = cpu.logprobs[i].top
                assert top[0][1] - top[1][1] < 0.05, (i, cpu.token_ids, gpu.token_ids)
                break


def test_nothing_is_allocated_after_the_start() -> None:
    with LLM(progress=False, max_running=64, num_pages=2000) as llm:
        llm.generate(["warm"], max_tokens=4).result()
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        settings = dict(
            max_tokens=[1 + i % 40 for i in range(200)], temperature=[i % 2 for i in range(200)], seed=list(range(200))
        )
        prompts = [list(range(3, 4 + 7 * i)) for i in range(200)]
        llm.generate(prompts, **settings, top_p=[0.9 if i % 3 else 1.0 for i in range(200)]).result()
        assert torch.cuda.memory_stats()["segment.all.allocated"] == before


def test_an_engine_that_starts_while_another_decodes() -> None:
    """Its compiling and capturing leave the first one's tokens as they are."""
    asked = dict(max_tokens=2000, min_tokens=2000, temperature=0.0)
    with LLM(progress=False, max_running=8, num_pages=500) as first:
        alone = first.generate(["Count:"], **asked).result()[0]
        running = first.generate(["Count:"], **asked)
        with LLM(progress=False, max_running=4, num_pages=200) as second:
            assert second.generate(["Count:"], max_tokens=20, min_tokens=20, temperature=0.0).result()[0].token_ids[:5]
            beside = running.result()[0]
        again = first.generate(["Count:"], max_tokens=50, min_tokens=50, temperature=0.0).result()[0]
    assert beside.token_ids == alone.token_ids and again.token_ids == alone.token_ids[:50]


def test_requests_that_come_and_go_on_the_device(tiny: Path) -> None:
    """Decodes whose token is on the device, with settings of every kind, alone and together: the same tokens or a near tie."""
    asked = dict(max_tokens=30, seed=7, logprobs=True, top_logprobs=2)
    kinds = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.3}, {"logit_bias": {5: 4.0}}]
    kinds += [{"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}, {"min_tokens": 20}]
    with LLM(device="cuda", num_pages=400, progress=False) as llm:
        running = [llm.generate("Sort 31, 4, 15", **asked, **kind) for kind in kinds for _ in range(4)]
        together = [generation.result()[0] for generation in running]
        for i, kind in enumerate(kinds):
            alone = llm.generate("Sort 31, 4, 15", **asked, **kind).result()[0]
            same = [output.token_ids == alone.token_ids for output in together[4 * i : 4 * i + 4]]
            assert sum(same) >= 3, (kind, alone.token_ids, [o.token_ids for o in together[4 * i : 4 * i + 4]])


def test_grammars_beside_free_rows_and_the_memory_after_them() -> None:
    """Under a schema every answer is of it, whatever is drawn beside it; a stopped engine leaves nothing behind."""
    before = torch.cuda.memory_allocated()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}, "strict": True},
    }
    with LLM(num_pages=3000, progress=False) as llm:
        asked = [{"role": "user", "content": "What is 12 + 30? Reply in JSON with the key n."}]
        running = [llm.chat(asked, response_format=form if i % 2 else None, seed=i, max_tokens=400) for i in range(24)]
        outputs = [generation.result()[0] for generation in running]
    for output in outputs[1::2]:
        assert output.finish_reason == "length" or set(json.loads(output.content)) == {"n", "ok"}, output.content
    assert sum(output.finish_reason == "stop" for output in outputs[1::2]) >= 6
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 128 << 20  # kernels keep small workspaces, cuBLAS one for each thread
