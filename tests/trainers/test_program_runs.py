"""Runs whose episodes are played by a program: on a tiny model, repeated, and killed in the middle."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.config.errors import ConfigError
from tandem.config.evaluation import load_evaluation
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.evaluation.run import check_evaluation
from tandem.flow.services import asks_for_reward
from tandem.sandbox.choose import choose_sandbox
from tandem.trainers.loop import train
from tests.sandbox.machine import processes_with
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, metrics, weights

PLAYER = """
import json, os, sys, time, urllib.request
def ask(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
first = ask([{"role": "user", "content": sys.argv[1]}])
more = ask([{"role": "user", "content": sys.argv[1]}, first, {"role": "user", "content": "Again."}])
said = first["content"] + more["content"]
json.dump({"reward": sum(map(said.count, "aeiou")) / (1 + len(said))}, open(os.environ["TANDEM_REWARD_FILE"], "w"))
"""


@pytest.fixture
def played(overrides, tmp_path):
    """A run whose episodes `PLAYER` plays in two turns."""
    try:
        choose_sandbox().close()
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")
    template = tmp_path / "template"
    template.mkdir()
    (template / "play.py").write_text(PLAYER)
    others = [item for item in overrides if not item.startswith("reward=")]
    items = ["workflow=program", "workflow_args.command=python3 play.py {prompt}", f"workflow_args.template={template}"]
    return [*others, *items, *SAVED_EACH_STEP, "total_train_steps=2", "tracking.trajectories_per_step=4"]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_trains_on_what_a_program_said_to_the_model_and_is_repeatable(played):
    folders = []
    for trial in ("one", "two"):
        summary = train(load_config(TrainConfig, None, [*played, f"trial_name={trial}"]))
        folders.append(summary.folder)
    one, two = (weights(folder, 2) for folder in folders)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    rows, again = (metrics(folder) for folder in folders)
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in again]
    assert {row["rollout/recorded/turns"] for row in rows} == {2.0} and not any("samples/failed" in row for row in rows)
    assert len({row["reward/mean"] for row in rows}) == 2 and rows[0]["grad_norm"] > 0
    assert '"assistant"' in next((folders[0] / "trajectories").iterdir()).read_text()


def test_rows_need_no_answer_where_no_reward_was_chosen_and_a_program_says_it():
    def config(*items):
        return load_config(TrainConfig, None, ["train_dataset.path=addition", *items]).config

    program = ("workflow=program", "workflow_args.command=true")
    assert not asks_for_reward(config(*program)) and asks_for_reward(config())
    assert asks_for_reward(config(*program, "reward=gsm8k"))


def test_a_reward_beside_the_exit_code_is_refused():
    items = [
        "train_dataset.path=addition",
        "workflow=program",
        "workflow_args.command=sleep 1",
        "workflow_args.reward_from=exit",
    ]
    load_config(TrainConfig, None, items)
    with pytest.raises(ConfigError, match=r"reward=gsm8k is not used, because workflow_args\.reward_from=exit"):
        load_config(TrainConfig, None, [*items, "reward=gsm8k"])


def test_an_evaluation_gives_a_program_its_own_deadline_and_knobs(model):
    words = [f"model={model}", "data=addition", "workflow=program", "workflow_args.command=sleep 1", "episode_timeout_s=60"]
    checked = check_evaluation(load_evaluation(None, [*words, "sandbox=none"]).config)
    checked.services.close()
    assert checked.workflow.timeout_s == 48


@pytest.mark.slow
@pytest.mark.invariant
def test_no_program_outlives_a_run_that_is_killed_and_the_run_goes_on(zygote, played, tmp_path):
    mark = f"600.{time.time_ns()}"
    waiting = tmp_path / "template" / "play.py"
    fork = f'import os\nif os.fork() == 0:\n    os.execvp("sleep", ["sleep", "{mark}"])\n'
    waiting.write_text(fork + PLAYER + "time.sleep(600)\n")
    with ThreadPoolExecutor(1) as thread:
        runs = Runs(zygote, tmp_path, "rl", played)
        arguments = ["rl", [*runs.items, "trial_name=killed"], None]
        call = thread.submit(zygote.call, "tests.trainers.killing:train", arguments, tmp_path / "log", kill_after=9.0)
        seen = 0
        while not call.done():
            seen = max(seen, len(processes_with(mark)))
            time.sleep(0.1)
        assert call.result() == -signal.SIGKILL and seen >= 4, (tmp_path / "log").read_text()
        until = time.monotonic() + 60
        while (left := processes_with(mark)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == []
        waiting.write_text(PLAYER)
        assert runs.go("killed") == 0
    assert len(metrics(runs.folder("killed"))) == 2
