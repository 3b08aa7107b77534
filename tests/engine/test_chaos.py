"""The scheduler under arrivals, aborts, deferrals and steps in any order: every answer is the one by the definition."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from simplellm.errors import RequestError
from tests.engine.fake import Engine, ids


class Chaos(RuleBasedStateMachine):
    """Arrivals, aborts, deferrals and steps in any order, also between the halves of a step. The engine audits each half."""

    rids = Bundle("rids")

    @initialize(
        lag=st.integers(0, 1), num_pages=st.integers(6, 24), budget=st.sampled_from([3, 64, 200, 2048]),
        cache=st.booleans(), rows=st.integers(1, 6), window=st.sampled_from([128, 128, 9]),
    )  # fmt: skip
    def start(self, lag: int, num_pages: int, budget: int, cache: bool, rows: int, window: int) -> None:
        self.engine = Engine(
            lag=lag, num_pages=num_pages, token_budget=budget, prefix_cache=cache, max_running=rows, window=window,
            penalty_slots=2, max_context=900,
        )  # fmt: skip

    @rule(
        target=rids, shared=st.sampled_from([0, 128, 140, 256, 384]), own=st.sampled_from([1, 2, 100, 128, 200]),
        seed=st.integers(0, 2), max_tokens=st.sampled_from([0, 1, 3, 40, 140, None]), priority=st.integers(-1, 1),
        masked=st.booleans(), penalty=st.sampled_from([0, 0, 0, 1.0]), scores=st.sampled_from([None, None, 0]),
        num=st.sampled_from([1, 1, 3]),
    )  # fmt: skip
    def arrive(
        self, shared: int, own: int, seed: int, max_tokens: int | None, priority: int, masked: bool, penalty: float,
        scores: int | None, num: int,
    ) -> int:  # fmt: skip
        prompt = ids(shared) + ids(own, 50 + seed)
        group = len(self.engine.requests) if num > 1 else None
        rid = 0
        for choice in range(num):
            try:
                request = self.engine.add(
                    prompt, max_tokens, seed=seed + choice, priority=priority, masked=masked, group=group,
                    presence_penalty=penalty, prompt_logprobs=None if choice else scores, logprobs=seed == 1,
                )  # fmt: skip
                rid = request.rid
            except RequestError:
                assert len(prompt) >= self.engine.scheduler.max_length
        return rid

    @rule(rid=rids, when=st.sampled_from(["now", "within a step"]))
    def abort(self, rid: int, when: str) -> None:
        if when == "now":
            self.engine.abort(rid)
        else:
            self.engine.step(between=lambda: self.engine.abort(rid))

    @rule(num=st.integers(1, 12), defer=st.sampled_from([0.0, 0.2, 1.0]), seed=st.integers(0, 5))
    def step(self, num: int, defer: float, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(num):
            self.engine.step(defer=lambda span: rng.random() < defer)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check()


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
