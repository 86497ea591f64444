"""A partner: another model, frozen, that a workflow talks to. It is not trained, it sleeps, and runs repeat to the bit."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import GIB, sleep_plan_here
from tandem.planning.fit import Plan
from tandem.planning.job import Lengths, job_of
from tandem.trainers.loop import train
from tandem.trainers.script import open_training
from tests.tiny import tiny_model_folder
from tests.trainers.planning import SMOLLM2, round_machine
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, assert_same, ledger

TALKING = Path(__file__).parent / "talking.py"
CLOCK = ("time", "tokens_per_s/", "memory/")


@pytest.fixture(scope="module")
def partner(tmp_path_factory):
    """Another model than the policy, which says something else to everybody."""
    return tiny_model_folder(tmp_path_factory.mktemp("partner"), seed=7)


def keys(overrides, partner, *more):
    found = [*(key for key in overrides if not key.startswith("reward=")), f"workflow={TALKING}:Asks"]
    found += [f"partner=model(path={partner}, max_new_tokens=6, temperature=1.0)", "valid_dataset.path=null"]
    found += ["deterministic=true", "tracking.trajectories_per_step=99", *more]
    return list({key.partition("=")[0]: key for key in found}.values())


def run(overrides, partner, *more):
    return train(load_config(TrainConfig, None, keys(overrides, partner, *more))).folder


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(CLOCK)} for line in lines]


def samples(folder, step):
    return [json.loads(line) for line in (folder / "trajectories" / f"step_{step}.jsonl").read_text().splitlines()]


def test_a_partners_words_are_context_and_only_the_policys_tokens_are_trained(overrides, partner):
    before = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in partner.iterdir()}
    folder = run(overrides, partner, "evaluate.every_steps=3", "evaluate.max_rows=2", "valid_dataset.path=addition")
    assert before == {file.name: hashlib.sha256(file.read_bytes()).digest() for file in partner.iterdir()}
    talked = [one for one in samples(folder, 1) if one["judges"]["partner"]]
    assert len(talked) > 1 and len({one["judges"]["partner"] for one in talked}) > 1
    for one in samples(folder, 1):
        said = [message["content"] for message in one["messages"] if message["role"] == "user"]
        assert said[1:] == ([one["judges"]["partner"]] if one["judges"]["partner"] else [])


def turns(ids, mask):
    """The runs of trained tokens."""
    return [[one for one, _ in run] for kept, run in itertools.groupby(zip(ids, mask, strict=True), lambda x: x[1]) if kept]


def test_every_trained_token_is_the_policys_and_no_word_of_the_partner_is_trained(overrides, partner):
    config = load_config(TrainConfig, None, keys(overrides, partner)).config
    with open_training(config, passes=("reference", "proximal", "advantages")) as (_, session):
        session.rollout.prepare_batch(session.loader, session.workflow)
        decode = session.tokenizer.decode
        for sample in (sample for group in session.rollout.last_groups for sample in group.samples):
            spoken = [m["content"] for m in sample.messages if m["role"] == "assistant"]
            trained = [ids for t in sample.trajectories for ids in turns(t.input_ids.tolist(), t.loss_mask.tolist())]
            assert [decode(ids, skip_special_tokens=True) for ids in trained] == spoken
            last = sample.trajectories[-1]
            assert sample.words["partner"] in decode(last.input_ids[~last.loss_mask])


@pytest.mark.parametrize("first", [False, True], ids=["the policy begins", "the partner begins"])
def test_a_deterministic_run_is_the_same_again_however_its_episodes_dawdle(overrides, partner, tmp_path, first):
    more = (f"workflow_args.first={first}", "total_train_steps=2")
    one = run(overrides, partner, *more)
    two = run(overrides, partner, *more, f"run.root={tmp_path / 'again'}", "workflow_args.dawdle_s=0.1")
    assert samples(one, 2)[0]["judges"] == samples(two, 2)[0]["judges"]
    assert rows(one) == rows(two)
    assert (one / "weights.jsonl").read_text() == (two / "weights.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_with_a_partner_that_is_killed_goes_on_to_the_bit(zygote, overrides, partner, tmp_path):
    runs = Runs(zygote, tmp_path, "rl", keys(overrides, partner, *SAVED_EACH_STEP))
    runs.go("whole")
    runs.go("killed", "after the optimizer step", 2)
    runs.go("killed", "between prepared and committed weights", 2)
    runs.go("killed")
    assert_same(runs.folder("whole"), runs.folder("killed"), 3)
    assert ledger(runs.folder("whole")) == ledger(runs.folder("killed"))


def test_a_partner_sleeps_while_the_policy_is_trained_and_the_run_is_the_same(overrides, partner, tmp_path):
    more = ("rollout.verify.every_steps=null", "rollout.engine.kv_cache_gib=0.0003", "total_train_steps=2")
    config = load_config(TrainConfig, None, keys(overrides, partner, *more, "memory_limit_gib=1")).config
    plan = sleep_plan_here(config, plan_run(config))
    assert {part.what for part in plan.parts if part.resident == "partner"} == {"parameters", "kv_cache"}
    tight = f"memory_limit_gib={1.01 * plan.least(plan.largest) / GIB}"
    awake = run(overrides, partner, *more)
    asleep = run(overrides, partner, *more, tight, f"run.root={tmp_path / 'tight'}")
    moved = [json.loads(line)["memory/moved_gib"] for line in (asleep / "metrics.jsonl").read_text().splitlines()[1:]]
    assert min(moved) > 0 and rows(asleep) == rows(awake)
    assert (asleep / "weights.jsonl").read_text() == (awake / "weights.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.invariant
def test_a_partner_writes_beside_asynchronous_training_too(overrides, partner):
    folder = run(overrides, partner, "async_training=true", "deterministic=false")
    assert len(rows(folder)) == 3 and any(one["judges"]["partner"] for one in samples(folder, 3))


def test_an_evaluation_talks_to_the_partner_and_answers_the_same_twice(model, partner, tmp_path):
    found = []
    for trial in ("one", "two"):
        words = [
            "eval",
            str(model),
            "data=[{path: addition, max_rows: 3}]",
            f"workflow={TALKING}:Asks",
            f"partner={partner}",
        ]
        words += [f"out={tmp_path}", f"label={trial}", "gconfig.max_new_tokens=8", "threads=1", "gconfig.temperature=1.0"]
        assert main([*words, "gconfig.n_samples=2"]) == 0
        lines = (tmp_path / trial / "samples.jsonl").read_text().splitlines()
        found.append([(json.loads(line)["text"], json.loads(line)["metrics"]["spoken"]) for line in lines])
    assert found[0] == found[1] and {1, 2} >= {turns for _, turns in found[0]} and any(turns == 2 for _, turns in found[0])


def test_the_plan_counts_a_partners_weights_and_its_cache():
    wanted = ["train_dataset.path=addition", "rollout.batch_size=8", "gconfig.n_samples=4"]
    config = load_config(
        TrainConfig, None, [*wanted, "rollout.engine.kv_cache_gib=0.5", "partner=model(path=wise, max_new_tokens=50)"]
    ).config
    made = Plan(job_of(config, round_machine(), Lengths(10, 20), lambda _: SMOLLM2), round_machine())
    (writer,) = made.job.writers.values()
    assert (writer.sequences, writer.lengths) == (32, Lengths(30, 50))
    held = [{i.what for i in one.items if i.role == "partner"} for one in made.instants]
    assert all({"parameters", "KV cache"} <= items for items in held)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["partner=nowhere"], "no partner is called 'nowhere'"),
        (["partner=model"], r"partner=model\(path=FOLDER\)"),
        (["partner=model(path=nowhere)"], "nowhere"),
        (["workflow=rlvr"], "nobody asks for 'partner'"),
        ([f"workflow={TALKING}:agent"], "needs the episode's engine"),
        (["actor.backend=fsdp:d2"], "2 ranks generate with an engine each"),
    ],
)
def test_a_partner_that_cannot_be_had_is_refused_at_start(overrides, partner, more, words):
    with pytest.raises(ConfigError, match=words):
        train(load_config(TrainConfig, None, keys(overrides, partner, *more)), dry_run=True)
