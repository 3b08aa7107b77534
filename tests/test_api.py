"""The Python API on the tiny model: the seed's quickstart, futures, streams, settings per prompt, refusals at the door."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simplellm import LLM, CheckpointError, EngineError, OptionError, RequestError


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, device="cpu", max_context=2048, progress=False) as engine:
        yield engine


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 30
    while llm._engine.scheduler.busy:
        assert time.monotonic() < deadline, "requests are left in the engine"
        time.sleep(0.01)


def test_the_quickstart_of_the_readme() -> None:
    from llm import LLM as seed_llm

    engine = seed_llm(device="cpu", progress=False)  # the built-in model in place of a path
    outputs = engine.generate(["What is the meaning of life?"], max_tokens=100).result()
    assert len(outputs) == 1 and isinstance(outputs[0].text, str)
    assert outputs[0].finish_reason in ("stop", "length") and len(outputs[0].token_ids) <= 100
    engine.stop()


def test_results_are_lists_in_prompt_order(llm: LLM) -> None:
    one = llm.generate("abc", max_tokens=3, temperature=0).result()
    ids = llm.generate(llm.tokenizer.encode("abc"), max_tokens=3, temperature=0).result()
    many = llm.generate(["xyz", llm.tokenizer.encode("abc"), "abc"], max_tokens=[1, 2, 3], temperature=0).result()
    assert len(one) == len(ids) == 1 and one[0].token_ids == ids[0].token_ids
    assert [output.index for output in many] == [0, 1, 2] and many[2].token_ids == one[0].token_ids
    assert many[1].token_ids == one[0].token_ids[:2] and one[0].prompt_tokens == 3


def test_seeds_fix_the_draw_and_lists_give_one_setting_per_prompt(llm: LLM) -> None:
    first = llm.generate(["hello"] * 4, max_tokens=8, seed=[1, 2, 1, 2]).result()
    texts = [output.token_ids for output in first]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    assert llm.generate("hello", max_tokens=8, seed=1).result()[0].token_ids == texts[0]
    assert (
        llm.generate("hello", max_tokens=8).result()[0].token_ids != llm.generate("hello", max_tokens=8).result()[0].token_ids
    )


def test_stop_strings_cut_text_ids_and_logprobs(llm: LLM) -> None:
    whole = llm.generate("hello", max_tokens=40, seed=3, logprobs=True, ignore_eos=True).result()[0]
    pieces = [llm.tokenizer.token_bytes(token) for token in whole.token_ids]
    at = next(
        i for i in range(4, 38) if len(pieces[i]) == 1 and pieces[i].isascii() and pieces[i + 1].isascii() and pieces[i + 1]
    )
    stop = (pieces[at] + pieces[at + 1]).decode()
    cut = llm.generate("hello", max_tokens=40, seed=3, logprobs=True, ignore_eos=True, stop=stop).result()[0]
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.logprobs) == len(cut.token_ids)
    assert llm.tokenizer.decode(cut.token_ids).startswith(cut.text)
    chunks = list(llm.stream("hello", max_tokens=40, seed=3, ignore_eos=True, stop=[stop, "zzz"]))
    assert "".join(chunk.text for chunk in chunks) == cut.text
    assert [token for chunk in chunks for token in chunk.token_ids] == cut.token_ids
    wait_until_idle(llm)


def test_stream_equals_generate(llm: LLM) -> None:
    settings = dict(max_tokens=30, seed=5, logprobs=True, top_logprobs=2, n=2)
    want = llm.generate(["abc", "de"], **settings).result()
    stream = llm.stream(["abc", "de"], **settings)
    text: dict[tuple[int, int], str] = {}
    ids: dict[tuple[int, int], list[int]] = {}
    logprobs: dict[tuple[int, int], list] = {}
    reasons = {}
    for chunk in stream:
        key = chunk.index, chunk.choice
        assert key not in reasons, "a chunk after the last one"
        text[key] = text.get(key, "") + chunk.text
        ids.setdefault(key, []).extend(chunk.token_ids)
        logprobs.setdefault(key, []).extend(chunk.logprobs)
        if chunk.finish_reason:
            reasons[key] = chunk.finish_reason
    for output in want:
        for choice in output.choices:
            key = output.index, choice.index
            assert (text[key], ids[key], reasons[key]) == (choice.text, choice.token_ids, choice.finish_reason)
            assert logprobs[key] == choice.logprobs
    assert [[c.text for c in o.choices] for o in stream.outputs] == [[c.text for c in o.choices] for o in want]


def test_n_answers_share_the_prompt_and_differ(llm: LLM) -> None:
    prompt = [random.Random(1).randrange(300) for _ in range(400)]
    output = llm.generate(prompt, n=4, max_tokens=6, seed=9, cache_salt="n").result()[0]
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in output.choices}) > 1
    assert output.choices[0].token_ids == llm.generate(prompt, max_tokens=6, seed=9, cache_salt="o").result()[0].token_ids


def test_prompt_logprobs_are_those_of_generation(llm: LLM) -> None:
    """Scoring a text that the model wrote gives the log-probabilities it had when it wrote it."""
    wrote = llm.generate("hello", max_tokens=20, seed=2, logprobs=True, ignore_eos=True).result()[0]
    text = llm.tokenizer.encode("hello") + wrote.token_ids
    scored = llm.generate(text, max_tokens=0, prompt_logprobs=1).result()[0]
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(text)
    assert scored.token_ids == [] and scored.finish_reason == "length"
    got = scored.prompt_logprobs[-20:]
    assert [entry.token for entry in got] == wrote.token_ids
    assert [entry.logprob for entry in got] == [entry.logprob for entry in wrote.logprobs]


def test_cached_tokens_of_a_second_turn(llm: LLM) -> None:
    prompt = [random.Random(2).randrange(300) for _ in range(600)]
    assert llm.generate(prompt, max_tokens=2, cache_salt="turns").result()[0].cached_tokens == 0
    assert llm.generate(prompt + [1, 2], max_tokens=2, cache_salt="turns").result()[0].cached_tokens == 512
    assert llm.generate(prompt + [1, 2], max_tokens=2, cache_salt="others").result()[0].cached_tokens == 0


def test_timings(llm: LLM) -> None:
    timings = llm.generate("abc", max_tokens=5).result()[0].timings
    assert 0 <= timings.queued <= timings.first_token <= timings.total < 30


@pytest.mark.parametrize(
    ("settings", "field", "limit"),
    [
        ({"temperature": -0.1}, "temperature", "at least 0"),
        ({"temperature": 2.5}, "temperature", "at most 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": 1.5}, "top_k", "whole number"),
        ({"min_p": 2}, "min_p", "at most 1"),
        ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", "out of range"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"logit_bias": {999999: 1}}, "logit_bias", "at most 319"),
        ({"logit_bias": {1: 101}}, "logit_bias", "at most 100"),
        ({"logit_bias": [1, 2]}, "logit_bias", "mapping"),
        ({"seed": 2**64}, "seed", "at most"),
        ({"max_tokens": -1}, "max_tokens", "at least 0"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "at most 3"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "at least one character"),
        ({"stop": 5}, "stop", "string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "at least 0"),
        ({"stop_token_ids": list(range(251))}, "stop_token_ids", "251 ids, at most 250"),
        ({"logprobs": 3}, "logprobs", "true"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=True"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"n": 0}, "n", "at least 1"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"max_tokens": [1, 2, 3]}, "max_tokens", "3 values for 2 prompts"),
        ({"priority": "high"}, "priority", "whole number"),
        ({"cache_salt": 5}, "cache_salt", "string"),
    ],
)
def test_settings_out_of_range_name_field_and_limit(llm: LLM, settings: dict, field: str, limit: str) -> None:
    with pytest.raises(RequestError, match=limit) as refused:
        llm.generate(["abc", "def"], **settings)
    assert refused.value.field == field
    assert not llm._engine.scheduler.busy


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "empty list"),
        ("", "empty"),
        (["abc", ""], "prompt 1: prompt: is empty"),
        (["abc", [5, 999]], "prompt 1: prompt: token id 999 is outside the vocabulary of 320"),
        (["abc", [1] * 5000], "prompt 1: prompt: 5000 tokens leave no room in a context of 2048"),
        (["abc", None], "prompt 1: prompt: NoneType"),
        (["abc", [1.5]], "prompt 1: prompt"),
        ([True, False], "neither text"),
        (7, "int is neither"),
        (b"abc", "bytes is neither"),
    ],
)
def test_an_invalid_prompt_fails_the_call_before_anything_is_queued(llm: LLM, prompts: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, max_tokens=2)
    assert not llm._engine.scheduler.busy


def test_numbers_of_any_size_and_settings_changed_later_do_no_harm(llm: LLM) -> None:
    """A top_k beyond 64 bits, or a bias added after the check, failed the step and so the engine, for everybody."""
    huge = llm.generate("abc", max_tokens=10**400, min_tokens=1, top_k=10**400, seed=1, priority=10**400)
    bias = {5: 100.0}
    biased = llm.generate("abc", max_tokens=200, ignore_eos=True, logit_bias=bias)
    bias[10**6] = 1.0
    assert huge.result(60)[0].token_ids and set(biased.result(60)[0].token_ids) == {5}
    last = llm.generate("abc", max_tokens=4, seed=[2**64 - 1], n=2).result(60)[0].choices[1].token_ids
    assert last == llm.generate("abc", max_tokens=4, seed=0).result(60)[0].token_ids, "seed + 1 wraps"


def test_max_tokens_beyond_the_room_is_clamped(tiny: Path) -> None:
    with LLM(tiny, device="cpu", max_context=64, progress=False) as llm:
        output = llm.generate([1] * 50, max_tokens=10**9, ignore_eos=True).result()[0]
        assert len(output.token_ids) == 14 and output.finish_reason == "length"
        with pytest.raises(RequestError, match="64 tokens leave no room in a context of 64"):
            llm.generate([1] * 64)


def test_a_future_in_every_way(llm: LLM) -> None:
    called = threading.Event()
    future = llm.generate("abc", max_tokens=3, temperature=0)
    assert isinstance(future, concurrent.futures.Future)
    future.add_done_callback(lambda f: called.set())
    want = future.result(timeout=30)[0].token_ids
    assert called.wait(5) and future.done() and not future.cancel()
    slow = llm.generate("abc", max_tokens=2000, ignore_eos=True)
    with pytest.raises(concurrent.futures.TimeoutError):
        slow.result(timeout=0.01)
    assert slow.cancel() and slow.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        slow.result()
    done, _ = concurrent.futures.wait([slow, llm.generate("abc", max_tokens=1)], timeout=30)
    assert len(done) == 2
    wait_until_idle(llm)

    async def in_asyncio() -> list[int]:
        return (await llm.generate("abc", max_tokens=3, temperature=0))[0].token_ids

    assert asyncio.run(in_asyncio()) == want


def test_results_inside_a_running_loop_as_in_jupyter(llm: LLM) -> None:
    async def cell() -> list[int]:
        blocking = llm.generate("abc", max_tokens=3, temperature=0).result(timeout=30)
        streamed = [token for chunk in llm.stream("abc", max_tokens=3, temperature=0) for token in chunk.token_ids]
        assert streamed == blocking[0].token_ids
        return streamed

    assert len(asyncio.run(cell())) <= 3


def test_async_stream_and_cancelled_task(llm: LLM) -> None:
    async def read(**settings: object) -> list[int]:
        return [token async for chunk in llm.stream("abc", **settings) for token in chunk.token_ids]

    async def main() -> None:
        want = (await llm.generate("abc", max_tokens=20, seed=1))[0].token_ids
        both = await asyncio.gather(read(max_tokens=20, seed=1), read(max_tokens=20, seed=1))
        assert both == [want, want]
        task = asyncio.create_task(read(max_tokens=2000, ignore_eos=True))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_idle(llm)


def test_leaving_a_stream_ends_its_requests(llm: LLM) -> None:
    for chunk in llm.stream("abc", max_tokens=2000, ignore_eos=True):
        assert chunk.text is not None
        break
    gc.collect()
    wait_until_idle(llm)
    with llm.stream("abc", max_tokens=2000, ignore_eos=True) as stream:
        next(iter(stream))
    assert list(stream) == []
    wait_until_idle(llm)


def test_stop_fails_what_is_pending(tiny: Path) -> None:
    llm = LLM(tiny, device="cpu", progress=False)
    future = llm.generate("abc", max_tokens=100_000, ignore_eos=True)
    stream = llm.stream("abc", max_tokens=100_000, ignore_eos=True)
    llm.stop()
    with pytest.raises(EngineError, match="stopped"):
        future.result(timeout=10)
    with pytest.raises(EngineError, match="stopped"):
        list(stream)
    with pytest.raises(EngineError, match="stopped"):
        llm.generate("abc")
    llm.stop()


def test_a_failing_step_fails_its_requests_and_three_in_a_row_end_the_engine(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny, device="cpu", progress=False)
    want = llm.generate("abc", max_tokens=4, temperature=0).result()[0].token_ids

    def broken(*_: object) -> None:
        raise RuntimeError("the device fell over")

    with monkeypatch.context() as patched:
        patched.setattr(llm._engine.worker.loop.runner, "body", broken)
        with pytest.raises(EngineError, match="RuntimeError: the device fell over"):
            llm.generate("abc", max_tokens=4).result(timeout=10)
    assert llm.generate("abc", max_tokens=4, temperature=0).result()[0].token_ids == want
    monkeypatch.setattr(llm._engine.worker.loop.runner, "body", broken)
    for _ in range(3):
        with pytest.raises(EngineError, match="the device fell over"):
            llm.generate("abc", max_tokens=4).result(timeout=10)
    with pytest.raises(EngineError, match="fell over"):
        llm.generate("abc")
    llm.stop()


@pytest.mark.parametrize("stopped_midway", [False, True])
def test_hammered_from_many_threads(tiny: Path, stopped_midway: bool) -> None:
    """Submit, stream, cancel from eight threads, and stop from a ninth: every future ends, nothing hangs, nothing leaks."""
    llm = LLM(tiny, device="cpu", num_pages=24, max_context=512, max_running=8, progress=False)
    want = llm.generate("same", max_tokens=4, temperature=0).result()[0].token_ids
    problems: list[str] = []
    stopping = threading.Event()

    def hammer(seed: int) -> None:
        rng = random.Random(seed)
        while not stopping.is_set():
            try:
                kind = rng.randrange(4)
                if kind == 0 and llm.generate("same", max_tokens=4, temperature=0).result(60)[0].token_ids != want:
                    problems.append("another answer")
                elif kind == 1:
                    llm.generate([rng.randrange(300)] * rng.randrange(1, 300), max_tokens=60).cancel()
                elif kind == 2:
                    next(iter(llm.stream("abc", max_tokens=200)))
                else:
                    list(llm.stream("xyz", max_tokens=5, n=2))
            except EngineError:
                return
            except Exception as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(1.5 if stopped_midway else 3)
    if stopped_midway:
        llm.stop()
    else:
        stopping.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not problems
    if stopped_midway:
        return
    gc.collect()
    wait_until_idle(llm)
    llm._engine.scheduler.audit()
    pool = llm._engine.scheduler.pool
    assert pool.num_available == pool.num_usable
    llm.stop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 5}, "did you mean 'memory_gb'"),
        ({"zzz": 5}, "known: device"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"dtype": "float16"}, "dtype: 'float16'"),
        ({"lag": 2}, "lag: 2"),
        ({"max_running": 0}, "max_running: 0 is below 1"),
        ({"max_context": 10**9}, "above the model's"),
        ({"memory_gb": 1e-4}, "leave room for 0 KV pages"),
        ({"memory_gb": -1}, "not above 0"),
        ({"memory_gb": float("inf")}, "at most 1e6"),
        ({"device": None}, "device: None"),
        ({"max_running": True}, "max_running: True is not a whole number"),
        ({"token_budget": "many"}, "token_budget: 'many'"),
        ({"prefix_cache": "yes"}, "prefix_cache: 'yes'"),
    ],
)
def test_options_that_do_not_exist_or_fit(tiny: Path, options: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        LLM(tiny, **({"device": "cpu", "progress": False} | options))


def test_a_missing_tokenizer_is_known_before_the_weights(tiny: Path, tmp_path: Path) -> None:
    """Case l05: one clear error, from the model's folder alone."""
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        LLM(tmp_path)
