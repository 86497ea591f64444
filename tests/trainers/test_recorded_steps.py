"""What is recorded of a run is what was trained: the same loss, the same weights, all turns, all ranks, all reasons."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from tandem import load_batch, load_trajectories
from tandem.cli.main import main
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import start_process
from tandem.rollout.book import NoBatch
from tandem.trainers.loop import train
from tests.ranks import on_two
from tests.rewards.asked import server
from tests.tracking.test_recorder import same
from tests.trainers.test_multi_turn import REWARDS, TURNS, items
from tests.trainers.test_rl import weights

EVERYTHING = "tracking.trajectories_per_step=null"


@pytest.fixture(autouse=True)
def undetermined():
    yield
    torch.use_deterministic_algorithms(False)


def config_of(overrides, *more):
    """Of two equal keys the last counts."""
    return load_config(TrainConfig, None, list({item.partition("=")[0]: item for item in [*overrides, *more]}.values()))


def run(overrides, *more):
    return train(config_of(overrides, *more))


def metrics(summary):
    rows = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in row.items() if not name.startswith(("time", "tokens_per_s", "memory"))}
        for row in rows
    ]


def wholly(overrides):
    """With each kind of log-probability, values, and mini-batches that are shuffled."""
    more = ["algorithm=ppo", "algorithm.kl.coefficient=0.1", "actor.mini_batches=2", "actor.epochs_per_batch=2"]
    return [*overrides, *more, "deterministic=true", "rollout.replay.groups=1", EVERYTHING]


def test_a_step_trained_again_from_its_record_gives_the_same_loss_and_weights(overrides):
    summary = run(wholly(overrides), "checkpoint.every_steps=1", "checkpoint.keep_last=null", "total_train_steps=2")
    batch = load_batch(summary.folder, 1)
    produced = {"rollout_logprobs", "proximal_logprobs", "reference_logprobs", "values", "returns", "advantages", "versions"}
    assert produced <= set(batch.keys())

    config = config_of(wholly(overrides), "total_train_steps=2", "trial_name=again").config
    with open_session(config, start_process(config), open_rows(config), 2, "again") as session:
        again = session.actor.ppo_update(batch) | {f"critic/{k}": v for k, v in session.critic.update(batch).items()}
        retrained = {name: tensor.detach().clone() for name, tensor in session.trainer.weights(torch.float32)}
    first = metrics(summary)[0]
    for name in ("loss", "grad_norm", "clip_fraction", "kl/reference", "entropy"):
        assert again[name] == first[name] and first[name] is not None, name
    saved = load_file(summary.folder / "checkpoints/step_1/model.safetensors")
    assert all(torch.equal(retrained[name], saved[name]) for name in saved)
    assert len(load_batch(summary.folder, 2)["cu_seqlens"]) - 1 == 4 * 4 + 4  # a replayed group with them


def test_a_recorded_run_and_one_that_is_not_are_equal_to_the_bit(overrides):
    keys = [*wholly(overrides), "total_train_steps=2"]
    recorded = run(keys, "trial_name=recorded")
    silent = run(keys, "trial_name=silent", "tracking.trajectories_per_step=0")

    assert metrics(recorded) == metrics(silent)
    one, other = weights(recorded), weights(silent)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert len(list(load_trajectories(recorded.folder))) == 2 * 16
    assert not (silent.folder / "batches").exists() and not (silent.folder / "trajectories").exists()


@pytest.mark.slow
@pytest.mark.invariant
def test_all_turns_are_recorded_and_each_request_with_its_times(overrides, model):
    summary = run(items(overrides, model), EVERYTHING, "async_training=true", "rollout.max_head_offpolicyness=1")

    samples = list(load_trajectories(summary.folder, 1))
    assert len(samples) == 2 * 4
    for sample in samples:
        roles = [message["role"] for message in sample.messages]
        turns = roles.count("assistant")
        assert roles[-1] == "assistant" and turns <= TURNS and len(sample.timings) == turns
        assert all(0 <= t.queued_s <= t.first_token_s <= t.total_s < 100 for t in sample.timings)
        assert sum(int(one["loss_mask"].sum()) for one in sample.trajectories) == sample.tokens > 0
    assert max(len(sample.timings) for sample in samples) == TURNS


def test_the_words_of_a_judge_are_recorded(overrides):
    def answer(body):
        return 200, {"choices": [{"message": {"content": "Quite good.\nScore: 7"}}]}

    with server(answer) as (url, _):
        summary = run(overrides, f"reward=judge(url={url}, model=m) + 0.5*{REWARDS}:even", "total_train_steps=1")

    samples = list(load_trajectories(summary.folder, 1))
    assert samples and {sample.judges["judge"] for sample in samples} == {"Quite good.\nScore: 7"}


def test_dropped_prompts_and_failed_samples_are_recorded_with_their_reasons(overrides, capsys):
    more = [f"reward={REWARDS}:fails_now_and_then", "rollout.min_group_size=4", EVERYTHING, "rollout.max_data_failures=1000"]
    summary = run(overrides, *more, "total_train_steps=4")

    samples = list(load_trajectories(summary.folder))
    dropped = [sample for sample in samples if sample.dropped]
    assert {sample.dropped for sample in dropped} == {"reward_raised"}
    assert len(dropped) == metrics(summary)[-1]["episodes/dropped/reward_raised"] > 0
    assert all("this answer cannot be judged" in sample.why for sample in dropped)

    assert main(["trajectories", str(summary.folder), "--step", "all", "--dropped"]) == 0
    said = capsys.readouterr().out
    assert "dropped: reward_raised" in said and "this answer cannot be judged" in said


def test_a_run_that_ends_because_everything_is_dropped_has_a_record_that_says_why(overrides, tmp_path):
    with pytest.raises(NoBatch):
        run(overrides, f"reward={REWARDS}:raises", "rollout.max_data_failures=8", "trial_name=broken")

    samples = list(load_trajectories(tmp_path / "tandem/broken", 1))
    assert samples and all("this reward is broken" in sample.why and sample.messages for sample in samples)


def on_ranks(items, ranks):
    """One step on so many ranks."""
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(torch.distributed.get_rank()), "LOCAL_WORLD_SIZE": str(ranks)}
    train(load_config(TrainConfig, None, [*items, f"actor.backend=fsdp:d{ranks}"]))
    torch.distributed.barrier()


def test_the_record_of_two_ranks_has_the_samples_of_both(overrides, tmp_path):
    more = ["deterministic=true", EVERYTHING, "total_train_steps=1"]
    (tmp_path / "out").mkdir()
    shared = [item for item in overrides if not item.startswith("total_train_steps")]
    on_two(on_ranks, [*shared, *more, "trial_name=two"], out=tmp_path / "out")
    alone = run(overrides, *more, "trial_name=one")

    one, two = (load_batch(tmp_path / f"tandem/{trial}", 1) for trial in ("one", "two"))
    for name in ("input_ids", "loss_mask", "cu_seqlens", "reward", "sample_id", "advantages", "versions"):
        assert same(one[name], two[name]), name
    assert len(list((tmp_path / "tandem/two/batches").iterdir())) == 1 and alone.steps == 1
