"""Addition is learnt over two served engines as it is in process: their tokens and their updates are the same."""

import pytest

from tests.learning.addition import learn

STEPS = 24
"""That it may take."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("eta", [0, 1])
def test_two_served_engines_learn_addition(tmp_path, eta):
    asynchronous = ("async_training=true", f"rollout.max_head_offpolicyness={eta}") if eta else ()
    seen = []
    learnt = learn(
        "grpo",
        steps=STEPS,
        goal=0.9,
        more=("rollout.backend=tandem:d2", "rollout.engine.threads=1", f"run.root={tmp_path}", *asynchronous),
        observe=lambda curve, metrics: seen.append(metrics),
    )
    print(f"\n{learnt.measured}, {learnt.step_s:.1f} s a step")
    assert learnt.first < 0.3
    assert learnt.reached, learnt
    assert max(metrics["staleness/max"] for metrics in seen) <= eta
    assert (seen[-1]["fleet/healthy"], seen[-1]["fleet/fenced"], seen[-1]["fleet/moved"]) == (2, 0, 0)
