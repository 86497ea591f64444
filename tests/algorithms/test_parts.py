"""Every part of an algorithm has one record, complete, and the record says what the function does."""

import pytest

from tandem.algorithms.preference import PREFERENCE_LOSSES
from tandem.algorithms.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    FILTERS,
    IMPORTANCE_WEIGHTS,
    KL,
    POLICY_LOSSES,
    PREPARATIONS,
    REJECTIONS,
    REQUIRED,
    SHAPING,
    TOKEN_FILTERS,
    knobs_of,
    own_knobs,
    preparation_of,
)
from tandem.config.algorithm import PRESETS, CorrectionConfig, KLConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.parts import PARTS
from tests.algorithms.tensors import gradient, packed

REGISTRIES = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "shaping": SHAPING,
    "filter": FILTERS,
    "token_filter": TOKEN_FILTERS,
    "correction.weight": IMPORTANCE_WEIGHTS,
    "correction.reject": REJECTIONS,
    "kl.estimator": KL,
    "loss": PREFERENCE_LOSSES,
}
EVERY = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry]


def test_every_registered_function_has_a_record_and_no_record_is_without_a_function():
    assert {kind: list(parts) for kind, parts in PARTS.items()} == {kind: list(REGISTRIES[kind]) for kind in PARTS}


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_record_is_complete(kind, name):
    part, function = PARTS[kind][name], REGISTRIES[kind].get(name)
    assert part.known and part.formula and part.asks == REGISTRIES[kind].inputs_of(function)
    assert all(number.count(".") == 1 and len(number) == 10 for number in part.sources)
    defaults = {knob: None if value is REQUIRED else value for knob, value in knobs_of(function).items()}
    assert {knob: rule.default for knob, rule in part.knobs.items()} == defaults
    for rule in part.knobs.values():
        assert rule.meaning.endswith(".")
        assert rule.default is None or rule.allows(rule.default)
        assert rule.at_most == "" or rule.at_most in part.knobs


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_a_proportional_loss_has_no_gradient_where_there_is_no_advantage(name):
    function, given = POLICY_LOSSES.get(name), packed([5, 6, 4, 7] * 5, seed=5, spread=0.4)
    given["advantages"] = given["advantages"].masked_fill(given["sequence"] % 2 == 0, 0.0)
    before = preparation_of(function)
    if before is not None:
        high = {"share": 0.9} if "share" in own_knobs(before) else {}
        given["prepared"] = before(**{key: given[key] for key in PREPARATIONS.inputs_of(before)}, **high)
    asked = {key: given[key] for key in POLICY_LOSSES.inputs_of(function)}
    _, slope, _ = gradient(function, asked.pop("policy"), **asked)
    assert slope.any()
    assert PARTS["policy_loss"][name].proportional is not bool(slope[given["advantages"] == 0].any())


def test_advantages_need_what_their_signatures_ask_for():
    def those(need):
        return {name for name, part in PARTS["advantage"].items() if getattr(part, need)}

    assert those("needs_critic") == {"gae"}
    assert those("needs_greedy") == {"remax"}
    assert those("needs_named_rewards") == {"gdpo"}
    assert set(PARTS["advantage"]) - those("needs_group") == {"gae", "remax", "reinforce", "reinforce_pp"}


def test_the_configuration_names_every_kl_estimator_and_null():
    (names, nothing) = KLConfig.__annotations__["estimator"].__args__
    assert (set(names.__args__), nothing) == (set(KL), type(None))


def test_the_bounds_of_the_correction_are_knobs_of_its_weights_with_equal_defaults():
    for name in IMPORTANCE_WEIGHTS:
        bounds = {"low": CorrectionConfig(name).low, "high": CorrectionConfig(name).highest}
        knobs = knobs_of(IMPORTANCE_WEIGHTS.get(name))
        assert knobs == {knob: bounds[knob] for knob in knobs}, name


@pytest.mark.parametrize("name", ["none", "truncate", "mask"])
@pytest.mark.parametrize(("bound", "value"), [("low", 0.5), ("high", 3.0)])
def test_a_bound_of_the_correction_is_accepted_only_where_the_weight_uses_it(name, bound, value):
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
