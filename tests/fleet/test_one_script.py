"""One script on every engine: `examples/gsm8k_grpo.py`, by `scripts/train_on_servers.py`, which checks what came of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "tests" / "trainers" / "small_rewards.py"


def outcome(model, backends, *items, deadline_s=240):
    """Exit status and output of the script."""
    command = [sys.executable, str(ROOT / "scripts" / "train_on_servers.py"), "--model", str(model), "--backends", *backends]
    done = subprocess.run(
        [*command, "--deadline-s", str(deadline_s), "--set", *items],
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
@pytest.mark.timeout(4000)
def test_the_example_trains_the_real_model_in_process_and_on_two_served_engines():
    status, said = outcome("smollm2-135m", ["embedded", "tandem:d2"], "threads=1", deadline_s=1800)
    assert status == 0 and "0 checks failed" in said


@pytest.mark.slow
def test_a_run_that_fails_is_reported_with_its_words_and_the_next_is_tried(model):
    status, said = outcome(model, ["tandem:d1", "embedded"], *TINY, "no_such_key=1")
    assert status >= 2 and "FAIL tandem:d1: 0 steps" in said and "FAIL embedded: 0 steps" in said
