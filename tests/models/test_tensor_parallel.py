"""What is cut under tensor parallelism, and what is refused."""

import pytest

from tandem.config.errors import ConfigError
from tandem.models.context_parallel import refuse_uneven_heads
from tandem.models.tensor_parallel import COLUMNS, PER_HEAD, ROWS
from tests.tiny import KINDS, tiny_config, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_of_a_layer_is_cut_as_transformers_would(kind):
    plan = tiny_config(kind).base_model_tp_plan
    ours = {
        **dict.fromkeys(COLUMNS, "colwise"),
        **dict.fromkeys(ROWS, "rowwise"),
        **dict.fromkeys(PER_HEAD, "replicated_with_grad_allreduce"),
    }
    theirs = {name.removeprefix("layers.*."): style for name, style in plan.items() if name.startswith("layers.*.")}
    assert {name: ours[name] for name in theirs} == theirs
    matrices = {name for name, module in tiny_model(kind).model.layers[0].named_modules() if hasattr(module, "in_features")}
    assert matrices == {*COLUMNS, *ROWS}


def test_heads_that_cannot_be_divided_are_refused_with_what_can():
    refuse_uneven_heads(3, 1, 1)
    with pytest.raises(ConfigError, match="3 heads on 1 key-value heads, which can be divided not at all; use d"):
        refuse_uneven_heads(3, 1, 2)
    refuse_uneven_heads(8, 4, 4)
    with pytest.raises(ConfigError, match="divided into 2, 4 parts"):
        refuse_uneven_heads(8, 4, 8)
