"""The page of presets has all of them with their formulas; what it says of the code is what the code does."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from tandem.cli.arguments import split_arguments
from tandem.config.algorithm import PRESETS
from tandem.config.coming_from import PAGE
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.keys import all_keys
from tandem.config.load import load_config, plain_data
from tandem.config.parts import PARTS
from tandem.config.preference import PreferenceConfig
from tandem.tracking.catalog import METRICS
from tandem.trainers.loop import train
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SCRIPT = runpy.run_path(str(ROOT / "scripts/algorithm_pages.py"))

EVEN = ROOT / "tests" / "trainers" / "small_rewards.py:even"

FAST = ("grpo", "ppo", "ttrl")
"""Presets whose command is run by `make test` too; the others by `make test-all`."""

OWN_REWARD = ("gdpo", "ttrl")
"""Presets whose command names its reward, or that take none."""


def section(name: str) -> str:
    """The part of the page about one preset."""
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "presets.md").read_text(), flags=re.M | re.S))[name]


def test_the_pages_are_what_the_code_makes():
    stale = [path.name for path, text in SCRIPT["pages"]().items() if path.read_text() != text]
    assert not stale, "run: python scripts/algorithm_pages.py"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_page_says_of_a_preset_what_is_in_its_records(preset):
    row = next(line for line in (DOCS / "presets.md").read_text().splitlines() if line.startswith(f"| [`{preset}`]"))
    entry, text = PRESETS[preset], section(preset)
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", f"algorithm={preset}"]).config.algorithm
    assert entry.summary in row and entry.when in row and entry.arxiv in row
    assert len(entry.text) > 60 and len(entry.defaults) > 20
    values = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])["algorithm"]
    for part in ("advantage", "policy_loss", "aggregation"):
        chosen, record = getattr(config, part), PARTS[part][getattr(config, part).name]
        assert values[part] == {"name": chosen.name, **{k: r.default for k, r in record.knobs.items()}, **chosen.knobs}
        first = record.formula.partition("; ")[0]
        assert "".join(first.split()) in "".join(text.split()), part
    needs = re.search(r"Needs: (.*)\.", text)[1].split(", ")
    assert ("critic" in needs) == PARTS["advantage"][config.advantage.name].needs_critic
    assert ("reference" in needs) == (config.kl.coefficient > 0)
    assert all(f"- `{metric}`: {advice}" in text for metric, advice in entry.watch.items())


def test_metrics_to_watch_are_in_the_catalogue():
    assert {name for preset in PRESETS.values() for name in preset.watch} <= set(METRICS)


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.refused])
def test_what_a_page_says_is_refused_is_refused(preset):
    refused = list(SCRIPT["refusals"](preset))
    assert refused
    for changes, message in refused:
        assert message, f"algorithm={preset} {changes} is not refused"


@pytest.mark.parametrize("preset", PRESETS)
def test_keys_that_a_page_mentions_can_be_set(preset):
    """A key=value in backticks is a change of this preset that works; those that are refused are said to be."""
    text = re.sub(r"^- Refused: .*(\n  .*)*", "", section(preset), flags=re.M)
    for words in re.findall(r"`([a-z_.]+=[^`]+)`", text):
        assert load_config(TrainConfig, None, ["train_dataset.path=addition", f"algorithm={preset}", *words.split()])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("preset", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PRESETS])
def test_the_command_of_a_page_runs(preset, model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(re.search(r"```bash\n(.*?)```", section(preset), re.S)[1])
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
    keys = {key for kind in (TrainConfig, SFTConfig, PreferenceConfig) for key in all_keys(kind)}
    knobs = {
        f"{'' if part == 'loss' else 'algorithm.'}{part}.{knob}": rule.default
        for part, choices in PARTS.items()
        for name, record in choices.items()
        if name in ("grpo", "gae", "ppo_clip", "sequence_mean", "dpo")
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
