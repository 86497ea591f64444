"""`tandem algorithms`: the list, one of them, a typing error, JSON."""

import json

import pytest

from tandem.cli.main import main
from tandem.config.algorithm import PRESETS
from tandem.config.parts import PARTS
from tests.cli.test_commands import imported_by


def test_the_list_has_every_preset_on_a_line_with_what_it_is(capsys):
    assert main(["algorithms"]) == 0

    lines = capsys.readouterr().out.splitlines()
    for name, preset in PRESETS.items():
        line = next(line for line in lines if line.startswith(f"{name} "))
        assert preset.summary.partition(" (arXiv")[0] in line


def test_the_list_as_json_says_paper_and_needs(capsys):
    assert main(["algorithms", "--json"]) == 0

    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(PRESETS)
    assert rows["dapo"]["arxiv"] == "2503.14476" and rows["dapo"]["needs"] == ["group"]
    assert rows["reinforce"]["needs"] == []


def test_every_part_is_listed_under_its_key_with_formula_and_knobs(capsys):
    assert main(["algorithms", "--parts"]) == 0
    said = capsys.readouterr().out
    assert main(["algorithms", "--parts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    there = {(row["key"], row["name"]) for row in rows}
    choices = {(f"algorithm.{key}", name) for key, names in PARTS.items() for name in names if name != "none"} - {
        ("algorithm.loss", name) for name in PARTS["loss"]
    }
    assert choices <= there
    assert {("algorithm.correction.weight", "truncate"), ("algorithm.kl.estimator", "k3_plus"), ("loss", "dpo")} <= there
    for row in rows:
        assert f"\n{row['key']}\n" in f"\n{said}" and f"\n  {row['name']}: " in said


def test_a_part_s_name_is_told_from_an_algorithm_s(capsys):
    assert main(["algorithms", "gspo_token"]) == 2
    assert "train with algorithm.policy_loss=gspo_token" in capsys.readouterr().err


def test_what_an_algorithm_needs_follows_its_parts(capsys):
    assert main(["algorithms", "grpo", "algorithm.kl.coefficient=0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"] == ["reference", "group"]


@pytest.mark.parametrize("name", PRESETS)
def test_one_of_them_says_everything(name, capsys):
    assert main(["algorithms", name]) == 0

    said = capsys.readouterr().out
    assert said.startswith(f"{name}: ")
    for word in (
        "\nneeds: ",
        "\nwhen: ",
        "\nadvantage: ",
        "\npolicy_loss: ",
        "\nasynchronous: ",
        "\nwatch\n",
        "\nalgorithm:\n",
    ):
        assert word in said, word


def test_a_part_may_be_changed(capsys):
    assert (
        main(["algorithms", "grpo", "algorithm.policy_loss.clip_high=0.3", "algorithm.kl.coefficient=0.01", "--json"]) == 0
    )

    said = json.loads(capsys.readouterr().out)
    assert said["algorithm"]["policy_loss"]["clip_high"] == 0.3
    assert said["algorithm"]["policy_loss"]["clip_low"] == 0.2  # a default, shown too
    assert said["formulas"]["kl"].startswith("0.01 × ")
    assert said["asynchronous"] == {"algorithm.correction.weight": "mask", "algorithm.correction.high": 5.0}


def test_a_typing_error_gets_the_nearest_name(capsys):
    assert main(["algorithms", "gropo"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_a_change_that_is_refused_says_why(capsys):
    assert main(["algorithms", "grpo", "algorithm.policy_loss.clip_hihg=0.3"]) == 2
    assert "clip_hihg" in capsys.readouterr().err


def test_no_torch_is_loaded_for_it():
    assert imported_by("algorithms", "dapo") == "[]"
