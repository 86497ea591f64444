"""Whatever stands behind a key, `tandem train --dry-run` gives a plan or a message, never a traceback."""

import importlib.util

import huggingface_hub
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem.cli.main import EXIT_CONFIG, main
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.keys import all_keys, leaves
from tests.tiny import tiny_model_folder

ODD = [
    "",
    "null",
    "true",
    "0",
    "-1",
    "1",
    "0.5",
    "1e300",
    "1e999",
    ".nan",
    "1" + "0" * 400,
    "0x" + "f" * 5000,
    "9223372036854775808",
    "2024-99-99",
    "word",
    "~nobody-has-this-home/x.py:y",
    "x" * 5000,
    "a:b",
    "nowhere.py:name",
    '"a\\0b"',
    '"\\ud800"',
    "'é ☃'",
    "[]",
    "[1, 2]",
    "[null]",
    "[[a]]",
    "{}",
    "{a: 1}",
    "{name: 1, knobs: 5}",
    "{name: {a: 1}}",
    "&a [*a]",
    "[&a [*a]]",
    "!!python/object:os.system x",
    "!!int abc",
    "=",
    "2024-01-01",
    "12:45",
]
"""Values as they may stand behind `key=`."""

TRAIN = ["train_dataset.path=addition", "reward=exact_number"]


SMALL = []
"""A model whose configuration and tokenizer are read quickly, and a folder for runs; `small_model` fills it."""


@pytest.fixture(scope="module", autouse=True)
def small_model(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("odd")
    SMALL[:] = [f"actor.path={tiny_model_folder(tmp)}", f"run.root={tmp / 'runs'}"]


def dry_run(command, *items):
    """The exit code; an exception that escapes fails the test that calls this. Of the rows a few are enough."""
    rows = [] if any(item.startswith("train_dataset") for item in items if item != TRAIN[0]) else ["train_dataset.size=4"]
    return main([command, *SMALL, *items, *rows, "--dry-run"])


def fits(items, run_capsys):
    code = dry_run(*items)
    error = run_capsys.readouterr().err
    assert code in (0, EXIT_CONFIG), error
    assert (code == EXIT_CONFIG) == error.startswith("error: ")
    assert "Traceback" not in error
    return code


@pytest.fixture(scope="module", autouse=True)
def hub_out_of_reach():
    """A word may be the name of a data set on the hub: nobody waits for its answer here."""
    patch = pytest.MonkeyPatch()
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if importlib.util.find_spec("datasets"):
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    yield
    patch.undo()


TRAIN_KEYS = list(all_keys(TrainConfig))


@pytest.mark.parametrize("number", range(len(TRAIN_KEYS)), ids=TRAIN_KEYS)
def test_a_third_of_the_odd_values_of_each_key_of_train_gives_a_plan_or_a_message(number, capsys):
    for value in ODD[number % 3 :: 3]:
        fits(("train", *TRAIN, f"{TRAIN_KEYS[number]}={value}"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("key", TRAIN_KEYS)
def test_any_value_of_any_key_of_train_gives_a_plan_or_a_message(key, capsys):
    for value in ODD:
        fits(("train", *TRAIN, f"{key}={value}"), capsys)


@pytest.mark.parametrize("key", sorted(set(all_keys(SFTConfig)) - set(all_keys(TrainConfig)) | {"seed", "train_dataset"}))
def test_any_value_of_any_key_of_sft_gives_a_plan_or_a_message(key, capsys):
    for value in ODD:
        fits(("sft", *TRAIN[:1], f"{key}={value}"), capsys)


COMPONENTS = [key for key, value in leaves(TrainConfig()) if type(value).__name__ == "Component"]


@pytest.mark.parametrize(
    "key",
    [
        *(f"{key}.{knob}" for key in COMPONENTS for knob in ("low", "knobs", "a.b")),
        "chat_template_kwargs.a",
        "chat_template_kwargs.a.b",
        "chat_template_kwargs.tools",
    ],
)
def test_knobs_and_free_keys_too(key, capsys):
    for value in ODD[::4]:
        fits(("train", *TRAIN, "chat_template_kwargs.a=1", f"{key}={value}"), capsys)


SPECS = [
    "x(",
    "math +",
    "9" * 400 + "*math",
    "1e999*math",
    "'a'*math",
    "(1+2j)*math",
    "length(target_tokens='x')",
    "length(target_tokens=0)",
    "math(workers=-1)",
    "math(**{'a': 1})",
    "math(timeout_s=3)",
    "(" * 500 + "math" + ")" * 500,
    "lambda: 0",
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_a_reward_that_cannot_be_read_gives_a_message(spec, capsys):
    assert fits(("train", *TRAIN, f"reward={spec}"), capsys) == EXIT_CONFIG


KEYS = st.sampled_from(list(all_keys(TrainConfig)))
VALUES = st.sampled_from(ODD) | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3))
@example(items=[("chat_template_kwargs", "{a: 1}"), ("chat_template_kwargs.a.b", "2")])
def test_a_few_odd_values_together_too(items, capsys):
    fits(("train", *TRAIN, *(f"{key}={value}" for key, value in items)), capsys)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(max_size=40)
    | st.lists(st.tuples(KEYS, VALUES), max_size=3).map(lambda p: "\n".join(f"{k}: {v}" for k, v in p))
)
@example(text="a: &x [*x]")
@example(text="&x {a: *x}")
@example(text="? [a]\n: 1")
@example(text="1: 2")
@example(text="<<: {seed: 1}")
def test_any_file_gives_a_plan_or_a_message(text, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    fits(("train", str(file), *TRAIN), capsys)
