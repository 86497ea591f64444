"""Every preset has its page, its note and its formulas; what a page says of the code is what the code does."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from tandem.algorithms.presets.notes import NOTES
from tandem.algorithms.presets.pages import refusals
from tandem.cli.arguments import split_arguments
from tandem.config.coming_from import PAGE
from tandem.config.experiment import TrainConfig
from tandem.config.keys import all_keys
from tandem.config.load import load_config, plain_data
from tandem.config.parts import PARTS
from tandem.config.presets import PRESETS
from tandem.tracking.catalog import SECTIONS
from tandem.trainers.rl import train
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SECTIONS_OF_A_PAGE = (
    "Formula",
    "When to use it",
    "Defaults and their source",
    "Metrics to watch",
    "Run it",
    "Limits",
)


EVEN = ROOT / "tests" / "trainers" / "small_rewards.py:even"

FAST = ("grpo", "ppo", "ttrl")
"""Presets whose command is run by `make test` too; the others by `make test-all`."""

OWN_REWARD = ("gdpo", "ttrl")
"""Presets whose command names its reward, or that take none."""


def page(name: str) -> str:
    return (DOCS / "algorithms" / f"{name}.md").read_text()


def test_every_preset_has_a_note_and_a_page_and_nothing_else_has():
    assert set(NOTES) == set(PRESETS)
    assert {path.stem for path in (DOCS / "algorithms").glob("*.md")} == set(PRESETS)


def test_the_pages_are_what_the_code_makes():
    made = runpy.run_path(str(ROOT / "scripts/algorithm_pages.py"))["pages"]()
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert not stale, "run: python scripts/algorithm_pages.py"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_has_all_its_sections_with_something_in_them(preset):
    found = re.split(r"^## (.+)\n", page(preset), flags=re.M)
    bodies = dict(zip(found[1::2], found[2::2], strict=True))
    assert tuple(bodies) == SECTIONS_OF_A_PAGE
    for title, body in bodies.items():
        assert len(re.sub(r"<!--.*?-->", "", body).strip()) > 20, title


@pytest.mark.parametrize("preset", PRESETS)
def test_links_of_a_page_lead_somewhere(preset):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page(preset)):
        assert "://" in target or (DOCS / "algorithms" / target).exists(), target


def test_metrics_of_the_notes_are_in_the_catalogue():
    known = {name for rows in SECTIONS.values() for name in rows}
    assert {name for note in NOTES.values() for name in note.watch} <= known


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_page_says_is_refused_is_refused(preset):
    for overrides, message in refusals(preset):
        assert message, f"algorithm={preset} {overrides} is not refused"


@pytest.mark.parametrize("preset", PRESETS)
def test_keys_that_a_page_mentions_can_be_set(preset):
    """What stands in backticks as key=value is a change of this preset that works; what is refused stands in its block."""
    text = re.sub(r"<!-- from the code.*?<!-- end -->", "", page(preset), flags=re.S)
    for words in re.findall(r"`([a-z_.]+=[^`]+)`", text):
        assert load_config(TrainConfig, None, ["train_dataset.path=addition", f"algorithm={preset}", *words.split()])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("preset", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PRESETS])
def test_the_command_of_a_page_runs(preset, model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(re.search(r"```bash\n(.*?)```", page(preset), re.S)[1])
    file, overrides = split_arguments(words[2:])
    small = [
        f"run.root={tmp_path}",
        f"actor.path={model}",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=2",
        "rollout.engine.kv_cache_gib=0.05",
        "gconfig.max_new_tokens=8",
        "total_train_steps=1",
        "evaluate.every_steps=1",
        "evaluate.max_rows=2",
        "tracking.plot_every_steps=null",
        "checkpoint.at_end=false",
        "threads=1",
        *([] if preset in OWN_REWARD else [f"reward={EVEN}"]),
    ]
    summary = train(load_config(TrainConfig, file, [*overrides, *small]))
    assert summary.steps == 1 and summary.metrics["grad_norm"] > 0


def test_the_page_for_those_who_come_from_elsewhere_is_what_errors_are_made_from():
    assert (DOCS / "coming_from.md").read_text() == PAGE.read_text(), (
        "run: python -m tandem.config.coming_from > docs/coming_from.md"
    )


def test_our_column_for_those_who_come_from_elsewhere_has_our_keys_and_our_defaults():
    config = load_config(TrainConfig, None, ["train_dataset.path=addition"]).config
    keys = set(all_keys(TrainConfig))
    knobs = {
        f"algorithm.{part}.{knob}": rule.default
        for part, choices in PARTS.items()
        for name, record in choices.items()
        if name in ("grpo", "ppo_clip", "sequence_mean")
        for knob, rule in record.knobs.items()
    }
    seen = 0
    for line in (DOCS / "coming_from.md").read_text().splitlines():
        cells = re.split(r"(?<!\\) \| ", line.strip("| "))
        if not line.startswith("|") or len(cells) < 2 or "Tandem" in cells[1]:
            continue
        for key, default in re.findall(r"`([a-z_.0-9]+)`(?: \(([^)]*)\))?", cells[1]):
            assert key in keys or key in knobs, f"{key} in: {line}"
            if default:
                assert same(default, knobs[key] if key in knobs else value_of(config, key)), f"{key} ({default})"
                seen += 1
    assert seen > 60


def value_of(config, key: str):
    for name in key.split("."):
        config = getattr(config, name)
    value = plain_data(config)
    return value["name"] if isinstance(value, dict) else value


def same(text: str, value) -> bool:
    try:
        return ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        return yaml.safe_load(text) == value
