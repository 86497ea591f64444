"""One script on every engine: `examples/gsm8k_grpo.py`, by `scripts/train_on_servers.py`, which checks what came of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_model_folder
from tests.trainers.calling import calling_model_folder

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "tests" / "trainers" / "small_rewards.py"


def outcome(model, backends, *items, deadline_s=240, more=()):
    """Exit status and output of the script; ``more``: further words of its command."""
    command = [sys.executable, str(ROOT / "scripts" / "train_on_servers.py"), "--model", str(model)]
    command += ["--backends", *backends] if backends else []
    done = subprocess.run(
        [*command, *more, "--deadline-s", str(deadline_s), "--set", *items],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline_s * len(backends) + 120,
    )
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout


TINY = (f"reward={REWARDS}:even", "threads=1", "rollout.engine.threads=1", "actor.optimizer.lr=1e-3")
"""Random answers earn nothing with the example's own reward, and then nothing is learnt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), max_position_embeddings=2048)


@pytest.mark.slow
@pytest.mark.invariant
def test_the_example_trains_on_two_served_engines(model):
    status, said = outcome(model, ["tandem:d2"], *TINY)
    assert status == 0 and "0 checks failed" in said


@pytest.mark.slow
def test_an_agent_and_tools_train_on_a_served_engine(model, tmp_path):
    agent = ROOT / "tests" / "trainers" / "recorded_agents.py"
    status, said = outcome(model, ["tandem:d1"], *TINY, more=["--workflow", f"{agent}:three_turns"])
    assert status == 0 and "0 checks failed" in said
    chat = [*TINY, f"actor.path={calling_model_folder(tmp_path)}", "workflow_args.tools=calculator"]
    status, said = outcome(model, ["tandem:d1"], *chat, more=["--workflow", "tools"])
    assert status == 0 and "0 checks failed" in said


@pytest.mark.slow
def test_one_of_two_servers_is_killed_and_the_other_one_makes_the_rest(model):
    status, said = outcome(model, ["tandem:d2"], *TINY, more=["--kill", "tandem"])
    assert status == 0 and "0 checks failed" in said
    assert "tandem:d2: kill -9 to" in said and "ok   tandem:d2: a tandem server was killed on the way" in said
    assert "-> fenced" in said


@pytest.mark.slow
@pytest.mark.invariant
def test_rank_0_is_killed_and_the_one_in_its_place_takes_its_server_over(model):
    status, said = outcome(model, ["tandem:d1"], *TINY, more=["--restart"])
    assert status == 0 and "0 checks failed" in said
    assert re.search(r"ok   tandem:d1: kill -9 to rank 0, process \d+, after step [12]: 1 restart\n", said)
    after = r"tandem-0 served after ([\d.]+) s, then ([\d.]+) s, [\d.]+ s after the kill"
    served = rf"ok   tandem:d1: {after}; the same process \d+: yes\n"
    started_s, taken_over_s = map(float, re.search(served, said).groups())
    assert taken_over_s < started_s
    assert re.search(r"ok   tandem:d1: the next step, [23], was done [\d.]+ s after the kill\n", said)


@pytest.mark.slow
def test_restarts_are_not_tried_with_an_engine_that_dies_with_its_rank(model):
    for backends in (["tandem:d1", "embedded"], []):
        status, said = outcome(model, backends, *TINY, more=["--restart"])
        assert status == 2 and not said


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_the_example_trains_the_real_model_in_process_and_on_two_served_engines():
    status, said = outcome("smollm2-135m", ["embedded", "tandem:d2"], "threads=1", deadline_s=1800)
    assert status == 0 and "0 checks failed" in said


@pytest.mark.slow
def test_a_run_that_fails_is_reported_with_its_words_and_the_next_is_tried(model):
    status, said = outcome(model, ["tandem:d1", "embedded"], *TINY, "no_such_key=1")
    assert status >= 2 and "FAIL tandem:d1: 0 steps" in said and "FAIL embedded: 0 steps" in said
