"""Every snippet in the documentation works, and pages that are made from code are up to date."""

import argparse
import ast
import pkgutil
import re
import runpy
import shlex
from pathlib import Path

import pytest

import tandem
from tandem.cli.arguments import split_arguments
from tandem.cli.eval import COMPARE, EVAL, resolve
from tandem.cli.main import COMMANDS
from tandem.config.evaluation import load_evaluation
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import KINDS, load_config
from tandem.config.recipes import sums_of
from tandem.config.terms import Options, read_terms

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/recipes").glob("*.md")])


def snippets(language: str) -> list:
    """All fenced blocks of a language, named by page and number."""
    found = []
    for page in PAGES:
        blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
        for number, block in enumerate(blocks, 1):
            found.append(pytest.param(block, blocks[0], id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize(("code", "first"), snippets("python"))
def test_python_snippets_run(code, first, tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(first)  # what later snippets of a page call it
    file = tmp_path / "snippet.py"
    file.write_text(code)
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(file))


@pytest.mark.parametrize(("code", "first"), snippets("python"))
def test_a_snippet_takes_a_public_name_from_tandem_itself(code, first):
    deeper = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) and node.module != "tandem"]
    names = {alias.name for node in deeper if str(node.module).startswith("tandem.") for alias in node.names}
    assert not names & set(tandem.__all__)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_files_are_configurations(path):
    text = path.read_text()
    if path.stem.endswith("_eval"):
        assert load_evaluation(path, ["model=smollm2-135m"]).config.data
        return
    trial = re.search(r"^trial_name: (\w+)", text, re.M)
    kind = KINDS.get(trial.group(1) if trial else "", TrainConfig)
    config = load_config(kind, path).config
    assert f"experiment_name: {config.experiment_name}\n" in text


def test_the_evaluation_page_shows_a_configuration(tmp_path):
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/evaluation.md").read_text(), re.M | re.S)
    (tmp_path / "eval.yaml").write_text(block)
    config = load_evaluation(tmp_path / "eval.yaml").config
    assert [data.path for data in config.data] == ["gsm8k", "my/folder"] and not config.gconfig.greedy


def test_the_rewards_of_the_rewards_page_can_be_read(tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/writing_a_reward.md").read_text(), re.M | re.S)
    (tmp_path / "run.yaml").write_text(f"train_dataset: {{path: addition}}\n{blocks[0]}")
    terms = read_terms(load_config(TrainConfig, tmp_path / "run.yaml").config.reward)
    assert [(term.label, term.weight) for term in terms] == [("math", 1.0), ("format", 0.2), ("helpful", 0.5)]
    assert terms[2].options == Options("running", (-3.0, 3.0), "format")
    (tmp_path / "mixed.yaml").write_text(f"train_dataset: {{path: addition}}\n{blocks[1]}")
    mixed = sums_of(load_config(TrainConfig, tmp_path / "mixed.yaml").config.reward)
    assert [[term.label for term in read_terms(one)] for one in mixed] == [["math", "format"], ["model", "length"]]


@pytest.mark.parametrize(("block", "first"), snippets("bash"))
def test_commands_name_files_and_keys_that_exist(block, first, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if "tandem " in line]
    for words in commands:
        name = words.index(next(word for word in words if Path(word).name == "tandem"))
        command, arguments = words[name + 1], [w for w in words[name + 2 :] if not w.startswith("-")]
        if command in (*KINDS, "config"):
            file, overrides = split_arguments(arguments)
            kind = SFTConfig if "sft" in str(file) else KINDS.get(command, TrainConfig)
            assert load_config(kind, file, overrides).config
        elif command in ("eval", "compare"):
            parser = argparse.ArgumentParser()
            {"eval": EVAL, "compare": COMPARE}[command].add_arguments(parser)
            parsed = parser.parse_intermixed_args(words[name + 2 :])
            assert command == "compare" or parsed.follow or resolve(parsed).config
        elif command not in ("generate", "doctor"):
            parser = argparse.ArgumentParser()
            pkgutil.resolve_name(f"tandem.cli.{COMMANDS[command].module}").add_arguments(parser)
            parser.parse_intermixed_args(words[name + 2 :])


def test_the_life_of_a_batch_names_the_files_and_their_lengths():
    page = runpy.run_path(str(ROOT / "scripts/life_of_a_batch.py"))["page"]()
    assert (ROOT / "docs/life_of_a_batch.md").read_text() == page


def test_from_prompt_to_gradient_it_is_a_short_walk():
    script = runpy.run_path(str(ROOT / "scripts/life_of_a_batch.py"))
    assert len(script["WALK"]) <= 7
    assert sum(script["lines"](name) for name, _ in script["WALK"]) <= 1410


def test_the_brackets_of_the_walk_are_all_files_that_it_calls_and_grow_no_longer():
    script = runpy.run_path(str(ROOT / "scripts/life_of_a_batch.py"))
    walk, brackets = [name for name, _ in script["WALK"]], script["brackets"]()
    named = re.findall(r"`(\w+\.py)`", " ".join(text for _, text in script["WALK"]))
    assert sorted(named) == sorted(Path(name).name for name in brackets)
    assert len(walk + brackets) <= 13
    assert sum(map(script["lines"], walk + brackets)) <= 2500


def test_what_stands_beside_the_walk_is_imported_by_it():
    script = runpy.run_path(str(ROOT / "scripts/life_of_a_batch.py"))
    imported = set().union(*(script["imported"](name) for name, _ in script["WALK"]))
    assert {f"src/tandem/{name}.py" for names in script["BESIDE"].values() for name in names} <= imported


def test_contributing_names_a_place_for_each_addition():
    rows = re.findall(r"^\| an? [^|]+\| ([^|]+)\| ([^|]+)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    places = [place for first, _ in rows for place in re.findall(r"`(src/[^`]+)`", first)]
    assert len(rows) >= 15 and len(places) >= len(rows)
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target
