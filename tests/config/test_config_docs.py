"""docs/configuration.md is made from the code, and every field has its sentence."""

import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest

import tandem.config
from scripts.configuration_page import markdown, sentences
from tandem.config.algorithm import PRESETS
from tandem.config.evaluation import EvaluationConfig
from tandem.config.experiment import TrainConfig
from tandem.config.keys import all_keys, bounds, leaves
from tandem.config.load import KINDS, load_config
from tandem.config.parts import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MODULES = [importlib.import_module(f"tandem.config.{m.name}") for m in pkgutil.iter_modules(tandem.config.__path__)]
CLASSES = {
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__name__.endswith("Config")
}


def test_the_page_is_what_the_code_makes():
    assert PAGE.read_text() == markdown(), "run: python scripts/configuration_page.py > docs/configuration.md"


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_every_field_has_one_sentence(cls):
    texts = sentences(cls)
    for field in dataclasses.fields(cls):
        assert texts.get(field.name, "").endswith("."), f"{cls.__name__}.{field.name} needs a sentence under it"


@pytest.mark.parametrize("cls", [*KINDS.values(), EvaluationConfig], ids=lambda c: c.__name__)
def test_every_default_lies_within_the_bounds_of_its_key(cls):
    defaults = dict(leaves(cls()))
    rules = bounds(cls)
    assert len(rules) >= 20
    assert [key for key, rule in rules.items() if defaults[key] is not None and not rule.allows(defaults[key])] == []


def test_every_promised_key_is_there():
    promised = """
    experiment_name trial_name run.root seed deterministic total_train_steps total_train_epochs async_training
    workflow reward train_dataset.path valid_dataset.path actor.path actor.backend actor.optimizer.lr
    actor.max_tokens_per_micro_batch rollout.backend rollout.batch_size rollout.max_concurrent
    rollout.max_head_offpolicyness rollout.on_expiry actor.dtype actor.mini_batches actor.epochs_per_batch
    algorithm.preset rollout.dtype threads chat_template_kwargs system_prompt gconfig.n_samples
    gconfig.max_new_tokens gconfig.temperature gconfig.top_p gconfig.top_k placement checkpoint.every_steps
    evaluate.every_steps
    """
    assert set(promised.split()) <= set(all_keys(TrainConfig))


def test_defaults_of_knobs_are_within_their_own_bounds():
    rules = [rule for parts in PARTS.values() for part in parts.values() for rule in part.knobs.values()]
    assert all(rule.default is None or rule.allows(rule.default) for rule in rules)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_configuration_that_works(preset):
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", f"algorithm={preset}"]).config
    assert config.algorithm.preset == preset
