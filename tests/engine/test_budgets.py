"""How many tokens a step takes: token_budget beside decodes, prompt_budget while more requests wait to begin."""

from tests.engine.fake import Engine, ids


def test_prompts_take_larger_steps_while_most_requests_wait_for_their_first_token() -> None:
    """prompt_budget until half of the requests decode, token_budget beside them."""
    engine = Engine(lag=0, token_budget=64, prompt_budget=1000, prefix_cache=False)
    for seed, num in enumerate((1500, 400)):
        engine.add(ids(num, seed), max_tokens=20, ignore_eos=True)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans[:3]] == [1000, 900, 2]
    engine.add(ids(100, 3), max_tokens=60, ignore_eos=True)
    engine.step()
    engine.add(ids(300, 4), max_tokens=1)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans if plan.num_tokens > 60] == [1000, 900, 100, 64, 64, 64, 64]
    engine.check()
    for max_running, sizes in ((5, [1000, 1000, 6]), (4, [1000, 64, 64])):  # in the second step 2 decode; 3 wait, or only 2
        engine = Engine(lag=0, token_budget=64, prompt_budget=1000, prefix_cache=False, max_running=max_running)
        for seed in range(6):
            engine.add(ids(400, seed), max_tokens=40, ignore_eos=True)
        engine.run()
        assert [plan.num_tokens for plan in engine.plans[:3]] == sizes
    engine = Engine(lag=0, token_budget=8, prompt_budget=1000, prefix_cache=False, num_pages=400)
    for seed in range(12):
        engine.add(ids(20, seed), max_tokens=40, ignore_eos=True)
    while not all(request.decoding for request in engine.scheduler.running) or len(engine.scheduler.running) < 12:
        engine.step()
    for seed in range(20):
        engine.add(ids(300, 50 + seed), max_tokens=2)
    engine.step()
    assert engine.plans[-1].num_tokens == 8  # more decode than a step holds: nobody begins
    engine.run()
    engine.check()
