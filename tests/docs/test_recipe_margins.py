"""Each page of an agents' recipe says how far above its control the run must end, and the recorded run ends there."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [
    ("calculator", "tool_recipes", "calculator", "grpo", "control"),
    ("search_agent", "tool_recipes", "search", "grpo", "control"),
    ("two_models", "two_models", "planner", "grpo", "control"),
    ("two_models", "two_models", "simulated_user", "grpo", "control"),
    ("number_game", "small_agents", "number_game", "turns", "chance"),
    ("repository_task", "small_agents", "mend", "grpo", "control"),
    ("rlhf_on_a_laptop", "rlhf_recipe", "without_sft", "ppo", "ppo_shuffled"),
    ("a_judge_that_compares", "small_agents", "judge", "grpo", "grpo_shuffled"),
    ("tldr_on_a_laptop", "small_agents", "tldr_laptop", "grpo", "grpo_shuffled"),
]
"""Page, record, its recipe, the run and the control."""


def shares(rows):
    """Per cent right: on held-out rows, in order; if there are none, in the first and the last three steps of training."""
    held_out = [100 * row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    seen = [100 * row["accuracy"] for row in rows if "accuracy" in row]
    return held_out or [sum(part) / 3 for part in (seen[:3], seen[-3:])]


@pytest.mark.parametrize(("page", "record", "recipe", "run", "control"), RECIPES, ids=[row[2] for row in RECIPES])
def test_a_run_ends_above_its_control_by_the_margin_that_its_page_states(page, record, recipe, run, control):
    text = (ROOT / f"docs/recipes/{page}.md").read_text()
    (margin,) = re.findall(r"must .*?at least (\d+) points", text)
    recorded = json.loads((ROOT / f"benchmarks/{record}.json").read_text())[recipe]
    trials = recorded.get("steps", recorded)
    ran, controlled = shares(trials[run]), shares(trials[control])
    assert trials[run][-1]["step"] == trials[control][-1]["step"]
    assert ran[-1] - controlled[-1] >= int(margin) >= 10 and ran[-1] > ran[0]
