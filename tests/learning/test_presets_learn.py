"""Every policy-gradient preset learns one-digit addition, and none of them learns from rewards that were dealt out anew."""

import pytest

from tandem.config.presets import PRESETS
from tests.learning.addition import learn

pytestmark = pytest.mark.slow

BUDGET = 18
"""Steps of 64 samples at most."""


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.timeout(1500)
def test_it_learns_addition_and_does_not_learn_from_shuffled_rewards(preset):
    learnt = learn(preset, steps=BUDGET, stop_at=0.8)
    assert learnt.first < 0.3
    assert learnt.last >= 0.8, learnt.measured

    control = learn(preset, steps=learnt.steps, shuffled=True)
    assert control.first < 0.3
    assert control.last < 0.3, control.measured
