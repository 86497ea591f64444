"""Groups, replay, curriculum, FIRE and the reference through the whole loop, on a tiny model."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.api.workflow import Group, RolloutWorkflow, Sample
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import make_loader, make_observer, make_rollout, open_rows
from tandem.flow.plan import plan_run
from tandem.rewards.reading import final_answer
from tandem.rollout.book import NoBatch
from tandem.rollout.workflows import Repeated
from tandem.trainers.loop import train
from tests.rollout.clockwork import ClockworkEngine, OneAnswer

REWARDS = Path(__file__).parent / "small_rewards.py"
TTRL = [
    "algorithm=ttrl",
    "gconfig.n_samples=6",
    "algorithm.update_samples=3",
    "gconfig.max_new_tokens=16",
    "deterministic=true",
]


def filter_of(config):
    return plan_run(config).algorithm.filter


def config_of(overrides, *more):
    keys = {item.partition("=")[0]: item for item in [*overrides, "total_train_steps=2", *more]}
    return load_config(TrainConfig, None, [item for item in keys.values() if not item.endswith("=-")])


def run(overrides, *more):
    """Trains; the last of two equal keys counts, and ``key=-`` leaves it out."""
    return train(config_of(overrides, *more))


def weights(summary):
    return load_file(summary.checkpoint / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps(summary):
    rows = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["step"] > 0]


def questions(path, answers, text="How much is {i} + 4?"):
    rows = [{"question": text.format(i=i)} | ({} if a is None else {"answer": a}) for i, a in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
@pytest.mark.invariant
def test_ttrl_never_sees_the_expected_answers(overrides, tmp_path):
    """Other answers, or none, change metrics and not one bit of the weights; other questions change the weights."""

    def learn(name, answers, text="How much is {i} + 4?"):
        data = questions(tmp_path / f"{name}.jsonl", answers, text)
        return run(overrides, *TTRL, "reward=-", f"trial_name={name}", f"train_dataset.path={data}")

    wrong = learn("wrong", ["424242"] * 8)
    samples = map(json.loads, (wrong.folder / "trajectories/step_1.jsonl").read_text().splitlines())
    majority = next(final_answer(sample["completion"]) for sample in samples if sample["reward"] == 1)
    right, none = learn("right", [majority] * 8), learn("none", [None] * 8)
    other = learn("other", ["424242"] * 8, "What is {i} minus 1?")

    assert same(weights(wrong), weights(right))
    assert same(weights(wrong), weights(none))
    assert not same(weights(wrong), weights(other))
    known, gold = steps(wrong)[0], steps(right)[0]
    assert known["ttrl/label_accuracy"] == known["accuracy"] == known["ttrl/pass@6"] == 0
    assert gold["ttrl/label_accuracy"] > 0
    assert gold["accuracy"] > 0
    assert gold["ttrl/pass@6"] > 0
    assert known["ttrl/reward_accuracy"] != gold["ttrl/reward_accuracy"]
    assert not {"accuracy", "ttrl/label_accuracy", "ttrl/pass@6"} & set(steps(none)[0])
    for name in ("reward/mean", "ttrl/majority_ratio", "loss", "grad_norm", "kl/reference"):
        assert known[name] == gold[name] == steps(none)[0][name], name
    assert known["grad_norm"] > 0


def test_remax_compares_with_a_greedy_answer_that_is_not_trained_on(overrides):
    summary = run(overrides, "algorithm=remax", "gconfig.n_samples=2", "deterministic=true")
    for row in steps(summary):
        assert row["groups/size"] == 3
        assert row["grad_norm"] > 0
        assert row["gap/max"] < 1e-3


def test_cpgd_through_the_loop_with_several_optimizer_steps(overrides, model):
    one = steps(run(overrides, "algorithm=cpgd", "deterministic=true", "trial_name=one"))[0]
    assert one["clip_fraction"] == 0  # one optimizer step: the policy is the proximal one
    two = run(overrides, "algorithm=cpgd", "deterministic=true", "actor.mini_batches=2", "actor.epochs_per_batch=2")
    assert steps(two)[0]["clip_fraction"] > 0
    assert all(row["grad_norm"] > 0 for row in steps(two))
    assert not same(weights(two), load_file(model / "model.safetensors"))


EVERYTHING = [
    "deterministic=true",
    "total_train_steps=3",
    "actor.mini_batches=2",
    "actor.epochs_per_batch=2",
    "rollout.replay.groups=2",
    "algorithm.update_samples=3",
    "gconfig.first_token_temperature=3.0",
    "curriculum.round_rows=6",
    "algorithm.kl.coefficient=0.01",
    "reference.refresh_every_steps=2",
]


def test_all_of_it_together_is_reproducible_and_counted(overrides):
    one, two = (run(overrides, *EVERYTHING, f"trial_name={name}") for name in "ab")
    assert same(weights(one), weights(two))
    rows = steps(one)
    assert [row["replay/groups"] for row in rows] == [0, 2, 2]
    assert [row["replay/reused"] for row in rows] == [0, 2, 4]
    assert all(row["replay/age_max"] <= 4 for row in rows)
    assert [row["episodes/trained"] for row in rows] == [4, 8, 12]
    assert [row["staleness/max"] for row in rows] == [0, 0, 0]
    assert [row["curriculum/round"] for row in rows] == [0, 1, 1]
    assert rows[-1]["curriculum/measured"] >= 6 / 2000
    assert rows[0]["correction/ess"] == pytest.approx(1)
    assert all(row["correction/ess"] < 0.999 for row in rows[1:])  # replayed tokens are off-policy


@pytest.mark.slow
@pytest.mark.invariant
def test_each_of_them_changes_the_weights(overrides):
    base = [item for item in EVERYTHING if not item.startswith(("total", "reference"))]
    found = {"base": weights(run(overrides, *base, "trial_name=base"))}
    for change in (
        "rollout.replay.groups=0",
        "algorithm.update_samples=4",
        "gconfig.first_token_temperature=1.5",
        "curriculum.round_rows=7",
    ):
        name = change.partition("=")[0].replace(".", "_")
        found[name] = weights(run(overrides, *base, change, f"trial_name={name}"))
    names = list(found)
    assert not [(a, b) for i, a in enumerate(names) for b in names[:i] if same(found[a], found[b])]


@pytest.mark.parametrize(("every", "zero"), [("1", [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("null", [1, 0, 0, 0])])
def test_the_distance_to_the_reference_is_zero_right_after_a_refresh(overrides, every, zero):
    options = ["algorithm.kl.coefficient=0.1", "total_train_steps=4", f"reference.refresh_every_steps={every}"]
    rows = steps(run(overrides, *options, "deterministic=true"))
    assert [int(row["kl/reference"] < 1e-9) for row in rows] == zero
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_run_whose_answers_never_parse_ends_with_the_reason(overrides, tmp_path):
    data = questions(tmp_path / "data.jsonl", ["1"] * 4)
    more = ["rollout.max_data_failures=3", "gconfig.max_new_tokens=1", "seed=3", "gconfig.temperature=0.01"]
    with pytest.raises(Exception, match="no_answer_parsed"):
        run(overrides, *TTRL, "reward=-", f"train_dataset.path={data}", *more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algorithm=ttrl", "algorithm.update_samples=65", "reward=-"], "at most gconfig.n_samples"),
        (
            ["algorithm=ttrl", "gconfig.n_samples=1", "algorithm.update_samples=null", "reward=-"],
            "one sample has no majority",
        ),
        (["algorithm=ttrl", "algorithm.advantage=remax", "reward=-"], "does not vote"),
        (["algorithm=ttrl", "gconfig.n_samples=64", "workflow=multi_turn", "reward=-"], "cannot know"),
        (["algorithm=ttrl", "gconfig.n_samples=64"], "judges by the vote"),
        (["algorithm.update_samples=1"], "every advantage would be 0"),
        (["curriculum.target=0.7"], "curriculum.round_rows is null"),
        (["curriculum.round_rows=4", "train_dataset.shuffle=false"], "draws rows anew"),
        (["curriculum.round_rows=2001"], r"at most the rows of train_dataset \(2000\)"),
        (["curriculum.round_rows=0"], "at least 1"),
        (["rollout.replay.max_age=3"], "rollout.replay.groups is 0"),
        (["rollout.replay.groups=2", "algorithm=opo"], "contradicts rollout.replay.groups"),
        (["gconfig.first_token_temperature=2", "gconfig.max_new_tokens=1"], "no other to learn"),
        (["gconfig.first_token_temperature=0"], "above 0"),
        (["reference.refresh_every_steps=2"], "algorithm.kl.coefficient is 0"),
    ],
)
def test_what_would_do_nothing_or_contradicts_is_refused(overrides, options, message):
    n_samples = [] if any("ttrl" in option for option in options) else ["gconfig.n_samples=4"]
    with pytest.raises(ConfigError, match=message):
        run([item for item in overrides if "n_samples" not in item], *n_samples, *options)


def test_replay_brings_the_presets_correction(overrides):
    grpo = config_of(overrides, "rollout.replay.groups=1")
    assert grpo.config.algorithm.correction.weight == "mask"
    assert grpo.sources["algorithm.correction.weight"] == "preset grpo, replay"
    free = config_of(overrides, "rollout.replay.groups=1", "algorithm.correction.weight=none").config
    assert free.algorithm.correction.weight == "none"


def group(index, *rewards, accuracies=None, counted=None):
    accuracies, counted = accuracies or [None] * len(rewards), counted or [True] * len(rewards)
    samples = [
        Sample((), reward, accuracy=accuracy, in_statistics=counts)
        for reward, accuracy, counts in zip(rewards, accuracies, counted, strict=True)
    ]
    return Group(tuple(samples), data={"tandem.index": index, "tandem.epoch": 0})


def test_the_curriculum_learns_the_success_of_samples_that_count(overrides):
    config = config_of(overrides, "curriculum.round_rows=5").config
    loader = make_loader(config, open_rows(config))
    observe = make_observer(loader)
    observe(group(3, 0.0, 0.0, accuracies=[1.0, 1.0]))
    observe(group(4, 1.0, 0.0, 1.0, counted=[True, True, False]))
    observe(group(5, 1.0, counted=[False]))
    assert loader.rates == {3: 1.0, 4: 0.5}
    assert make_observer(make_loader(config_of(overrides).config, open_rows(config))) is None


def test_the_curriculum_learns_of_groups_that_the_filter_turns_down(overrides):
    config = config_of(overrides, "curriculum.round_rows=5", "algorithm.filter=dynamic_sampling").config
    loader = make_loader(config, open_rows(config))
    with (
        make_rollout(config, filter_of(config), ClockworkEngine(), loader) as rollout,
        pytest.raises(NoBatch, match="no_spread"),
    ):
        rollout.prepare_batch(loader, Repeated(OneAnswer(), 2))
    assert set(loader.rates.values()) == {1.0}


def test_a_row_that_is_made_again_after_a_resume_is_measured_once(overrides):
    """Eight of twelve rows wait, finished, when the run is saved: they begin anew, and what came of them is forgotten."""
    config = config_of(overrides, "curriculum.round_rows=12", "async_training=true").config
    config = replace(config, rollout=replace(config.rollout, max_head_offpolicyness=2))
    rows = open_rows(config)
    loader = make_loader(config, rows)
    with make_rollout(config, filter_of(config), ClockworkEngine(), loader) as rollout:
        rollout.prepare_batch(loader, OneAnswer())  # every reward is 1
        rollout.end_step()
        while rollout.gate.waiting < 8:
            time.sleep(0.01)
        with rollout.standing_still():
            saved = json.loads(json.dumps([loader.state_dict(), rollout.state_dict()["pool"]]))
    again = make_loader(config, rows)
    resumed = make_rollout(config, filter_of(config), ClockworkEngine(), again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict({"pool": saved[1], "replay": resumed.replay.state_dict()})
    assert list(again.rates.values()) == [1.0] * 4
    with resumed:
        for _ in range(2):
            resumed.prepare_batch(again, NoneRight(OneAnswer()))  # every reward is 0 now
            resumed.end_step()
        assert sorted(again.rates.values()) == [0.0] * 8 + [1.0] * 4


class NoneRight(RolloutWorkflow):
    """The same answers, and none is right."""

    def __init__(self, workflow):
        self.workflow = workflow

    async def arun_episode(self, engine, data):
        return replace(await self.workflow.arun_episode(engine, data), reward=0.0)


def test_dynamic_sampling_fills_the_batch_beside_replay_and_counts_rejections(overrides):
    """With samples of one token, groups of two are often all even or all odd."""
    options = [
        "algorithm.filter=dynamic_sampling",
        "rollout.replay.groups=2",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=1",
    ]
    rows = steps(run(overrides, *options, "deterministic=true", "total_train_steps=3"))
    assert [row["episodes/trained"] for row in rows] == [4, 8, 12]
    assert all(row["groups/without_spread"] == 0 for row in rows)
    assert rows[-1]["episodes/dropped/filter/no_spread"] > 0
    assert [row["replay/groups"] for row in rows] == [0, 2, 2]
