"""Every policy-gradient preset learns one-digit addition, and none of them learns from rewards that were dealt out anew."""

import pytest

from tandem.config.algorithm import PRESETS
from tests.learning.addition import learn

pytestmark = pytest.mark.slow

CASES = [pytest.param(name, marks=[pytest.mark.invariant] if name == "grpo" else []) for name in PRESETS]


@pytest.mark.parametrize("preset", CASES)
@pytest.mark.timeout(900)
def test_it_learns_addition_and_does_not_learn_from_shuffled_rewards(preset):
    learnt = learn(preset)
    assert learnt.first < 0.3
    assert learnt.reached, learnt

    control = learn(preset, steps=learnt.steps, shuffled=True)
    assert control.last < 0.3, control
