"""Scheduler policy on a device without arithmetic: the same answers under every schedule, and the books balance."""

import random

import pytest

from simplellm.errors import RequestError
from simplellm.request import ON_DEVICE
from tests.engine.fake import Engine, ids

lags = pytest.mark.parametrize("lag", [0, 1])


def mixed(engine: Engine, num: int, seed: int) -> None:
    """Requests of many lengths and settings; some share prefixes."""
    rng = random.Random(seed)
    shared = [ids(300, 1), ids(260, 2)]
    for i in range(num):
        prompt = rng.choice(shared)[: rng.choice([0, 128, 200, 256, 300])] + ids(rng.choice([1, 5, 60, 130, 280]), 100 + i)
        sampling = rng.choice(
            [{}, {"ignore_eos": True}, {"ignore_eos": True}, {"min_tokens": 5}, {"stop_token_ids": (3, 4)}]
            + [{"logprobs": True}, {"presence_penalty": 0.5, "ignore_eos": True}, {"prompt_logprobs": 0}]
        )
        engine.add(
            prompt, max_tokens=rng.choice([5, 20, 200]), priority=rng.choice([0, 0, 0, 1, -1]), seed=rng.randrange(3),
            masked=rng.random() < 0.3, cache_salt=rng.choice(["", "", "a"]), **sampling,
        )  # fmt: skip


SCHEDULES = {
    "together": {},
    "one by one": {"max_running": 1},
    "chunks of 3": {"token_budget": 3},
    "large prompts, small mixed steps": {"token_budget": 7, "prompt_budget": 500},
    "small pool": {"num_pages": 11},
    "small pool, no cache": {"num_pages": 11, "prefix_cache": False},
    "no cache": {"prefix_cache": False},
    "odd budget, few rows": {"token_budget": 131, "max_running": 5, "penalty_slots": 1},
    "short window": {"window": 5, "num_pages": 20},
}


@lags
@pytest.mark.parametrize("name", SCHEDULES)
def test_answers_do_not_depend_on_the_schedule(name: str, lag: int) -> None:
    engine = Engine(lag=lag, **SCHEDULES[name])
    rng = random.Random(lag)
    mixed(engine, 12 if name == "chunks of 3" else 40, seed=5)
    engine.run(defer=lambda span: rng.random() < 0.3)
    engine.check()
    if name.startswith("small pool"):
        assert engine.scheduler.num_preemptions > 0, "the pool is not small enough to show anything"
    check_scores(engine)


@lags
@pytest.mark.parametrize("seed", range(12))
def test_answers_do_not_depend_on_the_schedule_in_tiny_pools(seed: int, lag: int) -> None:
    """Where every shortage happens: in a chunk, at a page's end, at the door, with hits whose pages are idle."""
    rng = random.Random(seed)
    for _ in range(3):
        engine = Engine(
            lag=lag, num_pages=rng.randint(5, 12), token_budget=rng.choice([5, 40, 150, 2048]), max_context=700,
            prefix_cache=rng.random() < 0.7, max_running=rng.randint(2, 9), penalty_slots=1,
        )  # fmt: skip
        for i in range(8):
            prompt = ids(rng.choice([0, 128, 256, 300]), 1) + ids(rng.choice([1, 40, 128, 300]), rng.choice([2, 50 + i]))
            if len(prompt) < engine.scheduler.max_length:
                engine.add(
                    prompt, max_tokens=rng.choice([0, 5, 60, 200]), ignore_eos=True, masked=rng.random() < 0.3, seed=i,
                    prompt_logprobs=rng.choice([None, None, 0]), presence_penalty=rng.choice([0, 0, 1.0]),
                )  # fmt: skip
        engine.run(defer=lambda span: rng.random() < 0.3)
        engine.check()
        check_scores(engine)


@lags
def test_slow_prompt_takes_pages_from_a_newer_one(lag: int) -> None:
    """A scored prompt goes on by 256 a step, so a newer prompt runs beside it, until a decode takes the last pages."""
    for num_pages in range(24, 32):
        for num_prompt in (124, 126):
            engine = Engine(lag=lag, num_pages=num_pages, token_budget=600, prefix_cache=False)
            engine.add(ids(num_prompt), max_tokens=150, ignore_eos=True)
            engine.step()
            engine.add(ids(1200, 1), max_tokens=2, prompt_logprobs=0)
            engine.add(ids(900, 2), max_tokens=2)
            engine.run()
            engine.check()
            check_scores(engine)


def check_scores(engine: Engine) -> None:
    """Each prompt token once, in order, from the right position."""
    for rid, request in engine.requests.items():
        if request.sampling.prompt_logprobs is not None:
            wanted = [(token, -float(i)) for i, token in enumerate(request.prompt[1:])]
            assert [(entry.token, entry.logprob) for entry in engine.scores[rid]] == wanted


@lags
def test_pages_all_come_back(lag: int) -> None:
    engine = Engine(lag=lag, prefix_cache=False)
    mixed(engine, 20, seed=6)
    engine.run()
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.num_usable


@lags
def test_request_alone_runs_to_its_clamped_end(lag: int) -> None:
    """The tightest pools: every page is needed at some time, and nobody else can be preempted."""
    for num_pages, cache in ((3, True), (4, True), (5, False), (6, True), (6, False), (7, True)):
        for num_prompt in (1, 128, 256, 400):
            engine = Engine(lag=lag, num_pages=num_pages, prefix_cache=cache)
            if num_prompt >= engine.scheduler.max_length:
                continue
            request = engine.add(ids(num_prompt), max_tokens=None, ignore_eos=True)
            engine.run()
            assert len(request.tokens) == engine.scheduler.max_length
            assert engine.reasons[request.rid] == "length"
            assert engine.scheduler.num_preemptions == 0, "it preempted itself"
            engine.check()


def test_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    engine = Engine(lag=1, num_pages=6, max_context=1000)  # 5 usable: 3 full and 2 window
    with pytest.raises(RequestError, match="1000 tokens leave no room in a context of 1000"):
        engine.scheduler.check(1000)
    with pytest.raises(RequestError, match=r"385 tokens need 6 KV pages .* the pool has 5"):
        engine.add(ids(385))
    with pytest.raises(RequestError, match="empty"):
        engine.add([])
    assert not engine.scheduler.busy and engine.scheduler.plan() is None
    engine.add(ids(384), max_tokens=1000)
    engine.run()
    assert (len(engine.answers[0]), engine.reasons[0]) == (1, "length")


@lags
def test_never_plans_beyond_max_tokens(lag: int) -> None:
    """A token too many would overrun the context, and cost a step."""
    for num_prompt in (3, 126, 128):
        engine = Engine(lag=lag)
        engine.add(ids(num_prompt), max_tokens=4, ignore_eos=True)
        engine.run()
        starts = [span.start for plan in engine.plans for span in plan.spans]
        assert starts == [0, num_prompt, num_prompt + 1, num_prompt + 2]


@lags
def test_scoring_only_samples_nothing(lag: int) -> None:
    engine = Engine(lag=lag)
    engine.add(ids(700), max_tokens=0, prompt_logprobs=0)
    engine.run()
    assert (engine.answers[0], engine.reasons[0]) == ([], "length")
    assert len(engine.scores[0]) == 699
    assert all(len(span.targets) <= 256 and not span.sample for plan in engine.plans for span in plan.spans)


def test_one_plan_mixes_decodes_and_a_chunk_decodes_first() -> None:
    engine = Engine(lag=1, token_budget=64)
    engine.add(ids(10), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.add(ids(200), max_tokens=1)
    engine.step()
    decode, chunk = engine.plans[-1].spans
    assert (decode.tokens, decode.start) == ((ON_DEVICE,), 10)
    assert (len(chunk.tokens), chunk.sample) == (63, False)


@lags
def test_order_is_priority_then_arrival(lag: int) -> None:
    engine = Engine(lag=lag, max_running=1)
    for priority in (1, 0, 1, -1, 0):
        engine.add(ids(5), max_tokens=2, ignore_eos=True, priority=priority)
    engine.run()
    first = [span.rid for plan in engine.plans for span in plan.spans if span.start == 0]
    assert first == [3, 1, 4, 0, 2]


@lags
def test_the_newest_is_preempted_and_its_token_in_flight_is_kept(lag: int) -> None:
    engine = Engine(lag=lag, num_pages=8, prefix_cache=False)
    for seed in (1, 2, 3):
        engine.add(ids(120, seed), max_tokens=200, ignore_eos=True)
    engine.run()
    starts = [span.rid for plan in engine.plans for span in plan.spans if span.start == 0]
    assert engine.scheduler.num_preemptions > 0
    assert starts.count(0) == 1, "the oldest was preempted"
    engine.check()


@lags
def test_little_is_computed_twice(lag: int) -> None:
    """Admission leaves each running request a page to grow by; without, this load preempts five to nine times."""
    engine = Engine(lag=lag, num_pages=40, prefix_cache=False)
    for seed in range(24):
        engine.add(ids(200 + seed * 37 % 300, seed), max_tokens=150, ignore_eos=True)
    engine.run()
    needed = sum(len(request.tokens) - 1 for request in engine.requests.values())
    assert sum(plan.num_tokens for plan in engine.plans) < 1.05 * needed
    engine.check()


@lags
def test_abort_in_every_state(lag: int) -> None:
    """Waiting, running, in flight, preempted, waiting for a slot: pages, row and slot come back, no event follows."""
    for steps in range(0, 40, 3):
        engine = Engine(lag=lag, num_pages=10, max_running=3, penalty_slots=1)
        mixed(engine, 8, seed=8)
        for seed in (1, 2):
            engine.add(ids(40, seed), presence_penalty=1.0)
        for _ in range(steps):
            engine.step()
        for rid in list(engine.requests)[::2]:
            engine.abort(rid)
        assert engine.scheduler.abort(0) is None, "an ended request has no second end"
        engine.run()
        engine.check()


@lags
def test_abort_within_any_step_caches_no_unknown_token(lag: int) -> None:
    """A page may be full on the device while its last token is not known yet, and then never will be."""
    for at in range(120, 136):
        engine = Engine(lag=lag)
        engine.add(ids(115), max_tokens=40, ignore_eos=True)
        while len(engine.requests[0].tokens) < at:
            engine.step()
        engine.step(between=lambda engine=engine: engine.abort(0))
        engine.add(engine.requests[0].tokens + ids(100))
        engine.run()
        engine.check()


@lags
def test_preempted_prompt_gives_each_log_probability_once(lag: int) -> None:
    engine = Engine(lag=lag, num_pages=11, token_budget=51)
    engine.add(ids(118), max_tokens=14, ignore_eos=True)
    engine.add(ids(640, 1), max_tokens=1, prompt_logprobs=0)
    engine.run()
    starts = [span.start for plan in engine.plans for span in plan.spans if span.rid == 1]
    again = starts.index(0, 1)
    assert set(starts[again:]) - set(starts[:again]), "not cut at other places the second time"
    check_scores(engine)


@lags
def test_parked_request_gets_the_slot_when_another_parked_one_is_aborted(lag: int) -> None:
    """A slot set aside for a request that was then aborted must not be lost to those behind it."""
    engine = Engine(lag=lag, penalty_slots=1, max_running=2)
    for seed in range(4):
        engine.add(ids(10, seed), max_tokens=5, ignore_eos=True, frequency_penalty=1.0)
    while 0 not in engine.reasons:
        engine.step()
    engine.abort(1)
    engine.run()
    assert [engine.reasons[rid] for rid in range(4)] == ["length", "abort", "length", "length"]


@lags
def test_requests_without_penalties_pass_those_that_wait_for_a_slot(lag: int) -> None:
    engine = Engine(lag=lag, penalty_slots=1)
    for seed in range(3):
        engine.add(ids(10, seed), max_tokens=5, presence_penalty=1.0)
    engine.add(ids(10, 9), max_tokens=5)
    engine.step()
    assert [span.rid for span in engine.plans[0].spans] == [0, 3]


@lags
def test_deferred_row_repeats_its_last_token_and_others_lose_nothing(lag: int) -> None:
    engine = Engine(lag=lag)
    engine.add(ids(10), max_tokens=6, ignore_eos=True, masked=True)
    engine.add(ids(10, 1), max_tokens=6, ignore_eos=True)
    engine.run(defer=lambda span: span.start in (11, 13) and len(engine.plans) % 3 > 0)
    for rid, most in ((0, 12), (1, 6)):
        starts = [span.start for plan in engine.plans for span in plan.spans if span.rid == rid]
        assert len(starts) <= most and sorted(set(starts)) == [0, 10, 11, 12, 13, 14]
    engine.check()


@lags
def test_second_turn_reuses_the_pages_of_the_first(lag: int) -> None:
    engine = Engine(lag=lag)
    first = engine.add(ids(300), max_tokens=100, ignore_eos=True)
    engine.run()
    second = engine.add(first.tokens + ids(50, 3))
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 384)
    assert engine.scheduler.cache.num_hit == 384
    engine.check()


@lags
def test_equal_prompt_hits_all_but_the_page_of_its_last_token(lag: int) -> None:
    for num, hit in ((256, 128), (257, 256), (300, 256), (128, 0)):
        engine = Engine(lag=lag)
        engine.add(ids(num))
        engine.run()
        assert engine.add(ids(num)).cached_tokens == 0  # known once admitted
        engine.run()
        assert engine.requests[1].cached_tokens == hit
        engine.check()


@lags
def test_shared_beginning_is_cached_from_the_second_time_on(lag: int) -> None:
    """No window page is kept where prompts part for the first time; seeing them part keeps it."""
    engine = Engine(lag=lag)
    for seed in range(3):
        engine.add(ids(500) + ids(200, seed + 1), max_tokens=3)
        engine.run()
    assert [engine.requests[rid].cached_tokens for rid in range(3)] == [0, 0, 384]
    engine.check()


@lags
def test_salt_keeps_prompts_apart(lag: int) -> None:
    engine = Engine(lag=lag)
    for salt in ("a", "b", "a"):
        engine.add(ids(300), cache_salt=salt)
        engine.run()
    assert [engine.requests[rid].cached_tokens for rid in range(3)] == [0, 0, 256]


@lags
@pytest.mark.parametrize("cache", [True, False])
def test_n_answers_share_the_prompt(lag: int, cache: bool) -> None:
    engine = Engine(lag=lag, prefix_cache=cache, token_budget=256)
    for seed in range(5):
        engine.add(ids(1000), seed=seed, group=77, max_tokens=4, ignore_eos=True)
    engine.run()
    assert [engine.requests[rid].cached_tokens for rid in range(5)] == [0] + [896] * 4
    assert len({tuple(answer) for answer in engine.answers.values()}) == 5
    if not cache:
        assert len(engine.scheduler.pool.free) == engine.scheduler.pool.num_usable, "pages stayed after the group's end"
    engine.check()


@lags
def test_requests_with_the_same_prompt_at_once_compute_it_once(lag: int) -> None:
    engine = Engine(lag=lag, token_budget=512)
    for _ in range(6):
        engine.add(ids(1500), max_tokens=2)
    engine.run()
    assert sum(plan.num_tokens for plan in engine.plans) < 1500 + 6 * 130
    engine.check()


@lags
def test_cache_fills_the_pool_and_gives_way(lag: int) -> None:
    engine = Engine(lag=lag, num_pages=20)
    for seed in range(20):
        engine.add(ids(300, seed % 7), max_tokens=90, ignore_eos=True)
        engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert len(engine.scheduler.pool.idle) > 8
    engine.check()


def test_two_window_pages_in_decode() -> None:
    engine = Engine(lag=1, prefix_cache=False)
    request = engine.add(ids(1000), max_tokens=300, ignore_eos=True)
    while 0 not in engine.reasons:
        engine.step()
        assert len(request.window) <= (2 if len(engine.answers[0]) > 1 else 9)


def test_step_touches_pages_only_at_their_borders() -> None:
    engine = Engine(lag=1)
    for seed in range(3):
        engine.add(ids(100, seed), max_tokens=100, ignore_eos=True)
    engine.run()
    assert sum(bool(plan.page_updates) for plan in engine.plans) == 2
    assert sum(len(plan.row_starts) for plan in engine.plans) == 3
