"""Stages: a role's methods say which fields they read and add."""

import pytest

from tandem.api.batch import Declaration, pack, stage, stages_of
from tandem.api.failures import BatchError


class Role:
    @stage(reads=("input_ids", "reward"), adds=("advantages",), reads_state=("weights",))
    def judge(self, batch, scale=1.0):
        """Docstring."""
        return batch["reward"] * scale

    @stage(writes_state=("optimizer",))
    def update(self, batch):
        return {}

    def other(self):
        return None


def test_a_stage_runs_its_method_and_keeps_name_and_docstring():
    batch = pack([{"input_ids": [1, 2], "reward": 2.0}])
    assert Role().judge(batch, scale=3.0).tolist() == [6.0]
    assert (Role.judge.__name__, Role.judge.__doc__) == ("judge", "Docstring.")


def test_the_declarations_of_a_role_are_found_by_method_name():
    assert stages_of(Role) == {
        "judge": Declaration("judge", ("input_ids", "reward"), ("advantages",), ("weights",)),
        "update": Declaration("update", writes_state=("optimizer",)),
    }


def test_a_missing_field_is_named_with_the_stage_and_the_fields_that_are_there():
    with pytest.raises(BatchError, match=r"judge needs the fields \['reward'\]; the batch has .*input_ids"):
        Role().judge(pack([{"input_ids": [1]}]))


def test_an_unknown_role_state_is_refused_when_it_is_declared():
    with pytest.raises(ValueError, match=r"must be one of .*got \['gradients'\]"):
        stage(reads_state=("gradients",))
