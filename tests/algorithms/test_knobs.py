"""The table of knobs in `config/` says what the functions' signatures say."""

import pytest

from tandem.algorithms.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    FILTERS,
    IMPORTANCE_WEIGHTS,
    KL,
    POLICY_LOSSES,
    REJECTIONS,
    REQUIRED,
    SHAPING,
    TOKEN_FILTERS,
    knobs_of,
)
from tandem.config.algorithm import CorrectionConfig, KLConfig
from tandem.config.coerce import without_none
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.knobs import CHOICES, GROUP_RELATIVE
from tandem.config.load import load_config
from tandem.config.presets import PRESETS

REGISTRIES = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "shaping": SHAPING,
    "filter": FILTERS,
    "token_filter": TOKEN_FILTERS,
    "correction.reject": REJECTIONS,
}


def test_every_kind_of_choice_has_a_registry():
    assert set(CHOICES) == set(REGISTRIES)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_table_and_functions_have_the_same_names(kind):
    assert set(CHOICES[kind]) == set(REGISTRIES[kind])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, registry in REGISTRIES.items() for name in registry])
def test_table_and_function_have_the_same_knobs_with_the_same_defaults(kind, name):
    table = {knob: rule.default for knob, rule in CHOICES[kind][name].items()}
    function = {k: None if v is REQUIRED else v for k, v in knobs_of(REGISTRIES[kind].get(name)).items()}
    assert table == function


def test_group_relative_advantages_are_those_that_compare_within_a_group():
    within = {"group_id", "in_statistics"}
    assert set(GROUP_RELATIVE) == {name for name in ADVANTAGES if within <= set(ADVANTAGES.asked(ADVANTAGES.get(name)))}


@pytest.mark.parametrize(
    ("config", "field", "registry"),
    [
        (CorrectionConfig, "weight", IMPORTANCE_WEIGHTS),
        (KLConfig, "estimator", KL),
    ],
)
def test_fixed_choices_of_the_configuration_are_the_registered_ones(config, field, registry):
    kind, _ = without_none(config.__annotations__[field])
    assert set(kind.__args__) == set(registry)


def test_the_configuration_names_every_kl_estimator_and_null():
    (names, nothing) = KLConfig.__annotations__["estimator"].__args__
    assert (set(names.__args__), nothing) == (set(KL), type(None))


def test_the_bounds_of_the_correction_are_the_knobs_of_its_weights_with_the_same_defaults():
    for name in IMPORTANCE_WEIGHTS:
        bounds = {"low": CorrectionConfig(name).low, "high": CorrectionConfig(name).highest}
        knobs = knobs_of(IMPORTANCE_WEIGHTS.get(name))
        assert knobs == {knob: bounds[knob] for knob in knobs}, name


@pytest.mark.parametrize("name", ["none", "truncate", "mask"])
@pytest.mark.parametrize(("bound", "value"), [("low", 0.5), ("high", 3.0)])
def test_a_bound_of_the_correction_is_accepted_where_the_weight_uses_it_and_nowhere_else(name, bound, value):
    items = [f"algorithm.correction.weight={name}", f"algorithm.correction.{bound}={value}"]
    items = ["train_dataset.path=addition", *items]
    if bound in knobs_of(IMPORTANCE_WEIGHTS.get(name)):
        assert getattr(load_config(TrainConfig, None, items).config.algorithm.correction, bound) == value
    else:
        with pytest.raises(ConfigError, match=rf"{bound}={value:g} is not used with weight={name}"):
            load_config(TrainConfig, None, items)


@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_a_preset_is_registered(name):
    for kind, registry in REGISTRIES.items():
        value = PRESETS[name].values.get(kind, [])
        for part in value if isinstance(value, list) else [value]:
            assert (part if isinstance(part, str) else part["name"]) in set(registry)
