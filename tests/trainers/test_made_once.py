"""From the command to the loop: nothing is made twice, and few files are opened by who follows the configuration."""

import runpy
import sys
from pathlib import Path

import pytest

import tandem
from tandem.cli.main import main
from tandem.config.experiment import BaseConfig
from tandem.config.load import Resolved

ROOT = Path(tandem.__file__).parent
SCRIPT = Path(__file__).parents[2] / "scripts/life_of_a_batch.py"

COUNTED = '''
from pathlib import Path

from tandem import FrozenModel, RewardFn, RewardResult, Score
from tandem.algorithms.advantages import grpo

NOTES = Path(__file__).with_name("notes")


def note(text):
    with NOTES.open("a") as file:
        file.write(text + "\\n")


class Judge:
    def __init__(self):
        note("judge")


class Mine(RewardFn):
    def __init__(self, judge):
        note("reward")

    async def __call__(self, *, completion, **rest):
        return RewardResult(float(len(completion)))

    def close(self):
        note("reward closed")


class Likes(Score):
    """Made by the plan of the run, and by nothing else."""

    def __init__(self, path):
        note("plan")
        self.model = FrozenModel(path)

    def score(self, batch, model):
        return model.forward(batch).logprobs[batch["cu_seqlens"][1:] - 1]


class Advantage:
    """Says whenever somebody resolves the name of the advantage."""

    @property
    def part(self):
        note("advantage")

    def __call__(self, rewards, group_id, in_statistics):
        return grpo(rewards, group_id, in_statistics)


advantage = Advantage()
'''


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    """One step of `tandem train`: notes of what was made, and the files whose functions took the whole configuration."""
    folder = tmp_path_factory.mktemp("made_once")
    file = folder / "mine.py"
    file.write_text(COUNTED)
    keys = {
        "run.root": folder,
        "actor.path": model,
        "train_dataset.path": "addition",
        "total_train_steps": 1,
        "gconfig.max_new_tokens": 4,
        "gconfig.n_samples": 2,
        "rollout.batch_size": 2,
        "rollout.engine.kv_cache_gib": 0.05,
        "tracking.plot_every_steps": "null",
        "threads": 1,
        "reward": f"{file}:Mine + 0.5*{file}:Likes(path={model})",
        "judge": f"{file}:Judge",
        "algorithm.advantage": f"{file}:advantage",
    }
    opened: set[str] = set()
    prefix, reached = f"{ROOT}/", []

    def look(frame, event, argument):
        code = frame.f_code
        if event != "call" or reached or not code.co_filename.startswith(prefix):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), (BaseConfig, Resolved)) for name in arguments):
            opened.add(code.co_filename.removeprefix(prefix))
        if (code.co_filename, code.co_name) == (f"{prefix}trainers/loop.py", "loop"):
            reached.append(True)

    sys.setprofile(look)
    try:
        assert main(["train", *(f"{key}={value}" for key, value in keys.items())]) == 0
    finally:
        sys.setprofile(None)
    assert reached
    return (folder / "notes").read_text().splitlines(), opened


def test_the_plan_the_rewards_a_service_and_the_algorithm_are_made_once(start):
    notes, _ = start
    assert sorted(notes) == ["advantage", "judge", "plan", "reward", "reward closed"]


def test_following_the_configuration_from_command_to_loop_opens_the_pages_files(start):
    _, opened = start
    page = {name.removeprefix("src/tandem/") for name, _ in runpy.run_path(str(SCRIPT))["CONFIGURATION"]}
    assert len(page) <= 12
    taking = {
        name for name in opened if not name.startswith("config/")
    }  # the rules and derived figures have pages of their own
    assert taking <= page
    assert {name for name in page - taking if not name.startswith("cli/")} == {"config/load.py"}
