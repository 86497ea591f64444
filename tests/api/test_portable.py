"""Errors between processes: those that come out as they went in travel, others are told in words."""

import pickle

import pytest

from tandem.api.failures import DataFailure, EngineDied, RewardFailure, UserCodeFailed, WrongWorkflow, survives_pickling
from tandem.config.errors import ConfigError


class Fussy(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a"),
        DataFailure("deadline", "b"),
        RewardFailure("reward_raised"),
        EngineDied("it was killed"),
        WrongWorkflow("c"),
        UserCodeFailed("d"),
    ],
)
def test_our_errors_travel(error):
    assert survives_pickling(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_an_error_that_cannot_be_made_from_its_text_does_not_travel():
    assert not survives_pickling(Fussy(1, 2))
