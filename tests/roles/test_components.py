"""Named choices: registered ones, and functions in a user's own file."""

import pytest
import torch

from tandem.algorithms.registry import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES, SHAPING
from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError
from tandem.roles.components import choose


def test_a_choice_takes_only_the_tensors_it_asks_for_and_its_knobs():
    clip = choose(SHAPING, Component("clip", {"high": 0.5}), "algorithm.shaping[0]")
    assert clip.knobs == {"low": -1.0, "high": 0.5}
    assert clip(rewards=torch.tensor([3.0, -3.0]), lengths=None, truncated=None).tolist() == [0.5, -1]


def test_a_knob_without_a_default_is_filled_in_or_asked_for():
    constant = Component("constant")
    assert choose(AGGREGATIONS, constant, "algorithm.aggregation", {"max_tokens": 8}).knobs == {"max_tokens": 8}
    given = Component("constant", {"max_tokens": 4})
    assert choose(AGGREGATIONS, given, "algorithm.aggregation", {"max_tokens": 8}).knobs == {"max_tokens": 4}
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation\.max_tokens must be set for constant"):
        choose(AGGREGATIONS, constant, "algorithm.aggregation", {"max_tokens": None})


def test_an_unknown_name_or_knob_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=gpro: .*did you mean 'grpo'\?"):
        choose(ADVANTAGES, Component("gpro"), "algorithm.advantage")
    with pytest.raises(ConfigError, match=r"clip_hi is not a knob of ppo_clip; did you mean 'clip_high'\?"):
        choose(POLICY_LOSSES, Component("ppo_clip", {"clip_hi": 0.3}), "algorithm.policy_loss")


def test_a_function_in_a_file_is_taken_as_it_is(tmp_path):
    (tmp_path / "mine.py").write_text("def half(rewards, *, share=0.5):\n    return rewards * share\n")
    mine = choose(ADVANTAGES, Component(f"{tmp_path}/mine.py:half", {"share": 0.25}), "algorithm.advantage")
    assert mine(rewards=torch.tensor([4.0]), group_id=None).tolist() == [1]


def test_a_function_in_a_file_that_asks_for_something_else_is_refused(tmp_path):
    (tmp_path / "wrong.py").write_text("def loss(policy, weather):\n    return policy\n")
    with pytest.raises(ConfigError, match=r"policy loss loss asks for 'weather'; it may ask for mask, sequence, policy"):
        choose(POLICY_LOSSES, Component(f"{tmp_path}/wrong.py:loss"), "algorithm.policy_loss")
    with pytest.raises(ConfigError, match="has no 'lost'"):
        choose(POLICY_LOSSES, Component(f"{tmp_path}/wrong.py:lost"), "algorithm.policy_loss")
