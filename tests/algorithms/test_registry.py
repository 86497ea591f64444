"""Registries: functions by name, their tensors and their knobs."""

import pytest

from tandem.algorithms.registry import POLICY_LOSSES, REQUIRED, Registry, UnknownName, WrongSignature, knobs_of
from tandem.config.parts import KnobRule


def registry():
    return Registry("loss", {"policy": "[T]", "mask": "[T]"})


def test_a_registered_function_is_found_by_name_and_returned_unchanged():
    losses = registry()

    @losses.register("mine", knobs={"strength": KnobRule(meaning="Factor.")})
    def mine(policy, mask, *, strength=1.0):
        return policy * strength

    assert losses.get("mine") is mine
    assert list(losses) == ["mine"]
    assert losses.inputs_of(mine) == ("policy", "mask")


def test_an_unknown_name_is_answered_with_the_nearest_and_all_there_are():
    with pytest.raises(UnknownName, match=r"no policy loss is called 'ppo_clop'; did you mean 'ppo_clip'\?.*reinforce"):
        POLICY_LOSSES.get("ppo_clop")


def test_a_name_is_given_once():
    losses = registry()
    losses.register("mine")(lambda policy: policy)
    with pytest.raises(ValueError, match="registered already"):
        losses.register("mine")(lambda policy: policy)


def test_a_function_that_asks_for_a_missing_tensor_is_refused_with_those_there_are():
    def greedy(policy, tomorrow):
        return policy

    with pytest.raises(WrongSignature, match=r"greedy asks for 'tomorrow'; it may ask for policy, mask"):
        registry().register("greedy")(greedy)


def test_a_record_whose_knobs_are_not_those_of_the_function_is_refused():
    def loss(policy, *, clip=0.2):
        return policy

    with pytest.raises(WrongSignature, match="loss: its signature has a knob 'clip', its record does not"):
        registry().register("mine")(loss)
    with pytest.raises(WrongSignature, match="loss: its record has a knob 'clop', its signature does not"):
        registry().register("mine", knobs={"clip": KnobRule(), "clop": KnobRule()})(loss)


def test_knobs_are_the_keyword_only_parameters():
    def loss(policy, *, clip=0.2, limit):
        return policy

    assert knobs_of(loss) == {"clip": 0.2, "limit": REQUIRED}
