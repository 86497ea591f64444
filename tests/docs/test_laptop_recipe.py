"""The laptop recipe's page shows what was recorded, and its parts fit each other."""

import json
import runpy
from pathlib import Path

import pytest

from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "laptop_recipe.py"))
ROWS = runpy.run_path(str(EXAMPLES / "gsm8k_short.py"))


def test_the_page_shows_the_recorded_figures():
    page, record = BENCHMARK["PAGE"].read_text(), json.loads(BENCHMARK["RECORD"].read_text())
    assert BENCHMARK["with_table"](page, record) == page
    assert {len(record["steps"]["sft"]) - 1, record["steps"]["sft"][-1]["step"]} == {157}
    assert all(evaluation["rows"] == 400 and evaluation["samples"] == 8 for evaluation in record["evaluations"].values())


def test_the_second_part_begins_with_what_the_first_leaves_and_both_ask_alike():
    first = load_config(SFTConfig, EXAMPLES / "gsm8k_laptop_sft.yaml").config
    second = load_config(TrainConfig, EXAMPLES / "gsm8k_laptop_grpo.yaml").config
    steps = -(-ROWS["IMITATED"] // first.batch_size)
    assert second.actor.path == f"runs/{first.experiment_name}/{first.trial_name}/checkpoints/step_{steps}"
    assert second.system_prompt == first.system_prompt
    assert f"system_prompt: {first.system_prompt}\n" in (EXAMPLES / "gsm8k_laptop_eval.yaml").read_text()


def test_no_row_is_in_both_parts_and_the_calculator_s_marks_are_gone(tmp_path, monkeypatch, capsys):
    rows = [{"question": "q" * n, "answer": f"{n} = <<{n}={n}>>{n}\n#### {n}"} for n in range(1, 3502)]
    for name, some in (("train", rows), ("test", rows[:500])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    monkeypatch.setattr("sys.argv", ["gsm8k_short.py", str(tmp_path), str(tmp_path / "out")])
    ROWS["main"]()
    made = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "rl", "test")
    }
    assert {name: len(some) for name, some in made.items()} == {"sft": 2500, "rl": 500, "test": 400}
    lengths = {name: {len(row["question"]) for row in made[name]} for name in ("sft", "rl")}
    assert lengths["sft"] | lengths["rl"] == set(range(1, 3001)) and not lengths["sft"] & lengths["rl"]
    assert all("<<" not in row["answer"] for some in made.values() for row in some)
    assert "sft.jsonl: 2500 rows" in capsys.readouterr().out


def test_a_folder_without_gsm8k_is_refused_with_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gsm8k_short.py", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        ROWS["main"]()
    assert "has no train.jsonl and no test.jsonl" in capsys.readouterr().err
