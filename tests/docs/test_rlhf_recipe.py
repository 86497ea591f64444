"""The page of RLHF on a laptop shows what was recorded."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "rlhf_recipe.py"))


def test_the_page_shows_the_recorded_figures():
    page, record = BENCHMARK["PAGE"].read_text(), json.loads(BENCHMARK["RECORD"].read_text())
    assert BENCHMARK["with_table"](page, record) == page


def test_the_kl_of_an_answer_is_that_of_its_tokens_and_a_curve_is_smoothed_backwards():
    assert BENCHMARK["answer_kl"]({"kl/reference": 0.1, "completion_length/mean": 20.0}) == 2.0
    assert BENCHMARK["smooth"]([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]) == [1.0, 2.0, 3.0, 5.0, 7.0, 9.0]


def test_sft_leaves_room_and_ppo_ends_above_it_by_the_margin_of_the_page():
    record, page = json.loads(BENCHMARK["RECORD"].read_text())["with_sft"], BENCHMARK["PAGE"].read_text()
    (margin,) = re.findall(r"must .*?at least (\d+) points", page)
    after = [100 * row["eval/accuracy"] for row in record["ppo"] if "eval/accuracy" in row]
    assert 100 * record["before"][0]["eval/accuracy"] < after[0] < 50 and after[-1] - after[0] >= int(margin)


def test_both_sides_of_the_coin_together_do_not_rise_and_ppo_is_above_them():
    record, page = json.loads(BENCHMARK["RECORD"].read_text())["with_sft"], BENCHMARK["PAGE"].read_text()
    (margin,) = re.findall(r"must .*?at least (\d+) points", page)
    (allowed,) = re.findall(r"must stay within (\d+) points", page)
    (step,) = re.findall(r"the mean of both sides at step (\d+)", page)
    ours = {row["step"]: 100 * row["eval/accuracy"] for row in record["ppo"] if "eval/accuracy" in row}
    mean = {at: 100 * preferred for at, (preferred, _) in BENCHMARK["both_sides"](record).items()}
    assert mean[0] == ours[0] and abs(mean[int(step)] - mean[0]) <= int(allowed)
    assert ours[int(step)] - mean[int(step)] >= int(margin)


def test_a_coin_that_was_balanced_by_length_has_sides_too_and_their_mean_stays():
    record, page = json.loads(BENCHMARK["RECORD"].read_text())["balanced"], BENCHMARK["PAGE"].read_text()
    (told,) = re.findall(r"from (\d+) % to (\d+) %, and the other side, with the same critic, to (\d+) %: (\d+) % in", page)
    one, other = ([row["eval/accuracy"] for row in record[side] if "eval/accuracy" in row] for side in BENCHMARK["SIDES"])
    mean = BENCHMARK["both_sides"](record)
    assert list(map(int, told)) == [round(100 * share) for share in (one[0], one[-1], other[-1], mean[4][0])]
    (allowed,) = re.findall(r"must stay within (\d+) points", page)
    assert abs(mean[4][0] - mean[0][0]) * 100 <= int(allowed)
