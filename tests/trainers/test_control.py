"""A reward that is changed while the run goes on: the change counts from the next step, once, whatever happens."""

import argparse
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.cli.runs import CONTROL
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, to_yaml
from tandem.config.recipes import Change, changed_reward
from tandem.state.control import FOLDER, JOURNAL, Mailbox, ask, changes, requests, take_answer
from tandem.state.run_folder import RunFolder
from tandem.trainers.loop import train
from tests.trainers.colocated import keys_of, make_models

MINE = Path(__file__).parent / "changing.py"
SMALL = Path(__file__).parent / "small_rewards.py"
CLOCK = ("time", "tokens_per_s/", "memory/")


def config_of(overrides, *more):
    keys = [*overrides, "deterministic=true", "checkpoint.every_steps=1", *more]
    return load_config(TrainConfig, None, list({key.partition("=")[0]: key for key in keys}.values()))


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(CLOCK)} for line in lines]


def folder_of(resolved):
    config = resolved.config
    return Path(config.run.root) / config.experiment_name / config.trial_name


def outcome(folder):
    return (folder / "weights.jsonl").read_text(), rows(folder)


@pytest.fixture
def where(overrides):
    return folder_of(config_of(overrides))


@pytest.fixture
def asks(where):
    """The spelling of a reward that asks for a change of its own run at its so-many-th call; in step 2 it has 17 to 36."""

    def spelled(call, action, value):
        return f"{MINE}:Asks(folder='{where}', call={call}, action='{action}', value='{value}', name='even')"

    return spelled


@pytest.mark.parametrize(
    ("action", "value", "reward"),
    [
        ("reward.weight", "b=0.3", "a + 0.3*b(words=2)"),
        ("reward.weight", "a=-1", "-1.0*a + 0.2*b(words=2)"),
        ("reward.add", "0.5*model(path='x y', name=c)", "a + 0.2*b(words=2) + 0.5*model(path='x y', name='c')"),
        ("reward.remove", "a", "0.2*b(words=2)"),
        ("reward.add", "c(clip=[0, 1], gate='a > 0.5')", "a + 0.2*b(words=2) + c(clip=[0, 1], gate='a > 0.5')"),
    ],
)
def test_a_change_is_written_into_the_spelling_of_the_reward(action, value, reward):
    assert changed_reward("a + 0.2*b(words=2)", Change(action, value)) == reward


@pytest.mark.parametrize(
    ("action", "value", "words"),
    [
        ("reward.weight", "formt=0.3", "did you mean 'format'"),
        ("reward.weight", "format", "NAME=NUMBER"),
        ("reward.weight", "format=nan", "NAME=NUMBER"),
        ("reward.remove", "formt", "did you mean 'format'"),
        ("reward.add", "0.3*format", "names a reward twice"),
        ("reward.add", "0.3*", "cannot be read"),
        ("reward.wight", "format=0.3", "did you mean 'reward.weight'"),
    ],
)
def test_a_change_that_makes_no_sense_names_what_is_near(action, value, words):
    with pytest.raises(ConfigError, match=words):
        changed_reward("math + 0.2*format", Change(action, value))
    with pytest.raises(ConfigError, match="only term"):
        changed_reward("math", Change("reward.remove", "math"))
    with pytest.raises(ConfigError, match="gate=format names no other term"):
        changed_reward("math(gate=format) + length + 0*format", Change("reward.remove", "format"))


BY = "by(column='source', recipes={'a': 'math', 'b': 'format'})"


@pytest.mark.parametrize(("spec", "change"), [(BY, Change("reward.weight", "math=2")), ("math", Change("reward.add", BY))])
def test_a_reward_that_chooses_by_row_stays_as_it_is(spec, change):
    with pytest.raises(ConfigError, match=r"chooses a recipe by row \(reward.by\) cannot be changed"):
        changed_reward(spec, change)


def test_changes_come_in_the_order_of_asking_and_again_before_their_step_once(tmp_path):
    run = Mailbox(tmp_path, "run", "a")
    names = [ask(tmp_path, Change("reward.weight", f"a={n}")) for n in range(5)]
    asked = list(run.due(3))
    assert [request.id for request in asked] == names
    for request in asked:
        run.record(request, 3, "a")
        run.answer(request.id, {"step": 3})
    assert list(run.due(4)) == []

    again = Mailbox(tmp_path, "run", "a")  # which goes on from a checkpoint of step 1
    assert list(again.due(2)) == []
    assert [(request.id, request.step) for request in again.due(3)] == [(name, 3) for name in names]
    assert list(again.due(3)) == [] == list(Mailbox(tmp_path, "another", "a").due(3))


@pytest.mark.slow
@pytest.mark.invariant
def test_a_change_counts_from_the_next_step_and_a_resumed_run_is_the_uncut_one(overrides, asks, where):
    reward = f"reward={asks(25, 'reward.add', f'5*{SMALL}:short')}"
    more = ("evaluate.every_steps=1", "evaluate.max_rows=2", "checkpoint.keep_last=null", reward)
    resolved = config_of(overrides, "total_train_steps=6", *more)
    train(resolved, until=5)
    whole = outcome(where)
    assert [(row["step"], row["action"]) for row in changes(where)] == [(3, "reward.add")]
    steps = [row for row in whole[1] if "reward/mean" in row]
    assert [row.get("control/changes") for row in steps] == [None, None, 1.0, 1.0, 1.0]
    assert [row.get("reward_weights/short") for row in steps] == [None, None, 5.0, 5.0, 5.0]
    assert "rewards/short" not in steps[1] and steps[2]["rewards/short"] < 0
    assert steps[1]["eval/reward"] >= 0 > steps[2]["eval/reward"]  # evaluation judges by the changed reward too

    for newest in (4, 2, 1):  # behind the change, and before it: then it is made again, before the same step
        for path in (where / "checkpoints").iterdir():
            if int(path.name.removeprefix("step_")) > newest:
                shutil.rmtree(path)
        train(resolved, until=5)
        assert outcome(where)[1] == whole[1]
        assert len(changes(where)) == 1


@pytest.mark.slow
@pytest.mark.invariant
def test_a_weight_of_0_takes_a_term_out_and_a_term_that_is_removed_is_gone(overrides, asks, where):
    reward = f"reward={asks(25, 'reward.weight', 'short=0')} + 0.5*{SMALL}:short"
    train(config_of(overrides, "total_train_steps=3", reward))
    assert [row["rewards/short"] < 0 for row in rows(where)] == [True, True, False]
    ask(where, Change("reward.remove", "short"))
    ask(where, Change("reward.weight", "even=2"))
    train(config_of(overrides, "total_train_steps=4", reward), override=True)
    last = rows(where)[-1]
    assert "rewards/short" not in last and last["control/changes"] == 3 and last["reward_weights/even"] == 2
    assert last["reward/mean"] == pytest.approx(last["rewards/even"])


REFUSED = [
    ("reward.weight", "mny=0.5", "did you mean 'many'"),
    ("reward.add", "0.5*lenght", "did you mean 'length'"),
    ("reward.add", "model(path=nowhere)", "can be neither added nor removed during a run"),
    ("reward.add", f"{MINE}:Shortest", "this run began without such a term"),
    ("reward.add", f"{MINE}:nothing", "nothing"),
    ("reward.add", "reasoning_gym", "reasoning"),
]
"""Action, value, and words of the answer."""


def test_what_cannot_be_done_is_refused_and_the_run_is_as_if_nobody_had_asked(overrides, where):
    resolved = config_of(overrides, "total_train_steps=2", f"reward={SMALL}:many")
    summary = train(resolved)
    quiet = outcome(summary.folder)
    shutil.rmtree(where)
    where.mkdir(parents=True)
    asked = {ask(where, Change(action, value)): words for action, value, words in REFUSED}
    train(resolved)
    for name, words in asked.items():
        refused = json.loads((where / FOLDER / f"{name}.answer").read_text())["refused"]
        assert words in refused and "Traceback" not in refused
    assert outcome(where) == quiet and not requests(where) and not changes(where)


def test_a_request_is_made_once_also_if_the_run_was_killed_around_writing_it_down(overrides, where):
    resolved = config_of(overrides, "total_train_steps=4", f"reward={SMALL}:many")
    train(resolved, until=2)
    name = ask(where, Change("reward.weight", "many=3"))  # and then nothing for a while, as after a kill
    request = (where / FOLDER / f"{name}.request").read_text()
    train(resolved, until=3)
    (where / FOLDER / f"{name}.request").write_text(request)  # killed between the record and the answer
    (where / FOLDER / f"{name}.answer").unlink()
    train(resolved)
    assert not requests(where) and json.loads((where / FOLDER / f"{name}.answer").read_text())["step"] == 3
    assert [row["step"] for row in changes(where)] == [3]
    assert [row.get("reward_weights/many") for row in rows(where)] == [None, None, 3.0, 3.0]


def test_the_command_changes_a_live_run_waits_for_its_answer_and_shows_the_change(overrides, where, capsys):
    ended = threading.Event()

    def command(*words):
        return main(["control", str(where), *words])

    def operate():
        while not (where / "metrics.jsonl").is_file() or not (where / "metrics.jsonl").read_text():
            time.sleep(0.01)
        parser = argparse.ArgumentParser()
        CONTROL.add_arguments(parser)
        CONTROL.run(parser.parse_args([str(where), "reward.weight", "many=0.25"]))
        with pytest.raises(ConfigError, match="did you mean 'many'"):
            CONTROL.run(parser.parse_args([str(where), "reward.weight", "mny=0.25"]))
        ended.set()

    thread = threading.Thread(target=operate, daemon=True)
    thread.start()
    train(config_of(overrides, "total_train_steps=400", f"reward={SMALL}:many", "checkpoint.every_steps=25"), until=25)
    thread.join(60)
    assert ended.is_set() and "on: reward=0.25*" in capsys.readouterr().out
    assert command() == 0
    assert "reward.weight many=0.25" in capsys.readouterr().out
    assert command("reward.weight", "many=1") == 2
    assert "is not training now" in capsys.readouterr().err
    assert command("reward.wieght", "many=1") == 2
    assert "did you mean 'reward.weight'" in capsys.readouterr().err


def test_a_journal_of_another_run_in_the_same_folder_is_not_read(overrides, where):
    where.mkdir(parents=True)
    row = {"step": 1, "id": "x", "run": "another", "action": "reward.weight", "value": "many=3", "reward": "3.0*many"}
    (where / JOURNAL).write_text(json.dumps(row) + "\n")
    train(config_of(overrides, "total_train_steps=1", f"reward={SMALL}:many"))
    assert "control/changes" not in rows(where)[0]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_term_with_options_comes_and_the_others_means_go_on_also_after_a_cut(overrides, where, asks):
    even = asks(25, "reward.add", f'0.3*{SMALL}:short(normalise="running", gate="many > 4")')
    reward = f"reward={even} + 0.5*{SMALL}:many(normalise=running, clip=[-1, 1])"
    resolved = config_of(overrides, "total_train_steps=6", "checkpoint.keep_last=null", reward)
    train(resolved, until=5)
    whole = outcome(where)
    assert [set(row) & {"gate/short", "raw_rewards/short"} for row in whole[1]] == [set()] * 2 + [
        {"gate/short", "raw_rewards/short"}
    ] * 3
    for newest in (4, 2, 1):
        for path in (where / "checkpoints").iterdir():
            if int(path.name.removeprefix("step_")) > newest:
                shutil.rmtree(path)
        train(resolved, until=5)
        assert outcome(where)[1] == whole[1]


def test_the_first_term_with_options_may_come_later_and_the_last_one_may_go(overrides, where):
    resolved = config_of(overrides, "total_train_steps=3", f"reward={SMALL}:even")
    train(resolved, until=1)
    ask(where, Change("reward.add", f"{SMALL}:many(normalise=group)"))
    train(resolved, until=2)
    ask(where, Change("reward.remove", "many"))
    train(resolved)
    first, second, third = rows(where)
    assert second["rewards/many"] == pytest.approx(0, abs=1e-6) and second["raw_rewards/many"] > 0
    assert "rewards/many" not in third and "rewards/many" not in first


def test_the_cost_of_a_constraint_stays_a_term_that_costs(overrides, where):
    reward = f"{SMALL}:useful + {SMALL}:harmful"
    resolved = config_of(
        overrides, "total_train_steps=3", f"reward={reward}", "constraint.cost=harmful", "constraint.limit=0.1"
    )
    train(resolved, until=1)
    refused = {
        Change("reward.remove", "harmful"): "constraint.cost=harmful is no term of reward",
        Change("reward.weight", "harmful=0"): "use a weight above 0",
        Change("reward.remove", "useful"): "is the only term of reward",
    }
    names = {ask(where, change): words for change, words in refused.items()}
    ask(where, Change("reward.weight", "harmful=2"))
    ask(where, Change("reward.add", f"0.1*{SMALL}:many"))
    train(resolved)
    for name, words in names.items():
        assert words in json.loads((where / FOLDER / f"{name}.answer").read_text())["refused"]
    assert [row["step"] for row in changes(where)] == [2, 2]
    for row in rows(where)[1:]:
        assert row["constraint/cost"] == pytest.approx(row["rewards/harmful"])
        assert row["reward/mean"] == pytest.approx(row["rewards/useful"] + row["rewards/many"], abs=1e-6)


def test_rows_whose_data_set_names_a_reward_keep_it_and_others_get_the_changed_one(overrides, where):
    sources = f"[{{path: addition, name: a, reward: '{SMALL}:even'}}, {{path: addition, name: b}}]"
    keys = [item for item in overrides if not item.startswith("train_dataset.path")]
    more = (f"train_dataset.sources={sources}", f"reward={SMALL}:even", "tracking.trajectories_per_step=99")
    resolved = config_of(keys, "total_train_steps=2", *more)
    train(resolved, until=1)
    ask(where, Change("reward.add", f"{SMALL}:many"))
    train(resolved)
    lines = (where / "trajectories" / "step_2.jsonl").read_text().splitlines()
    found = {(one["source"], *sorted(one["rewards"])) for one in map(json.loads, lines)}
    assert found == {("a",), ("b", "even", "many")}


def test_a_cost_that_only_another_data_set_has_costs_there(overrides, where):
    even = f"{SMALL}:even"
    sources = f"[{{path: addition, name: a, reward: '{even} + {SMALL}:harmful'}}, {{path: addition, name: b}}]"
    keys = [item for item in overrides if not item.startswith("train_dataset.path")]
    more = (f"train_dataset.sources={sources}", f"reward={even} + {SMALL}:harmful", "tracking.trajectories_per_step=99")
    resolved = config_of(keys, "total_train_steps=6", "rollout.batch_size=1", "constraint.cost=harmful", *more)
    train(resolved, until=1)
    ask(where, Change("reward.remove", "harmful"))
    train(resolved)
    with_cost = set()
    for step in range(2, 7):
        lines = (where / "trajectories" / f"step_{step}.jsonl").read_text().splitlines()
        with_cost |= {(one["source"], "harmful" in one["rewards"]) for one in map(json.loads, lines)}
    assert with_cost == {("a", True), ("b", False)}  # one prompt a batch, so there are batches without the cost


@pytest.mark.slow
@pytest.mark.invariant
def test_beside_generation_no_group_is_judged_by_two_rewards(overrides, where):
    more = ("deterministic=false", "async_training=true", "algorithm.correction.weight=truncate")
    more = (*more, "rollout.max_head_offpolicyness=2", "tracking.trajectories_per_step=99", "total_train_steps=8")
    keys = [*overrides, *more, f"reward={MINE}:Slow + 0*{SMALL}:many"]
    resolved = load_config(TrainConfig, None, list({key.partition("=")[0]: key for key in keys}.values()))
    where.mkdir(parents=True)
    made = threading.Event()

    def operate():
        while not (where / "metrics.jsonl").is_file() or len((where / "metrics.jsonl").read_text().splitlines()) < 2:
            time.sleep(0.002)
        for change in (Change("reward.add", f"10*{SMALL}:short(clip=[-99, 0])"), Change("reward.weight", "Slow=3")):
            take_answer(where, ask(where, change), 60)
        made.set()

    threading.Thread(target=operate, daemon=True).start()
    train(resolved)
    assert made.wait(1) and len(changes(where)) == 2
    kinds = set()
    for step in range(1, 9):
        groups = {}
        for line in (where / "trajectories" / f"step_{step}.jsonl").read_text().splitlines():
            one = json.loads(line)
            groups.setdefault(one["group"], set()).add((*sorted(one["rewards"]), one["rewards"]["Slow"]))
        assert all(len(found) == 1 for found in groups.values())
        kinds |= set.union(*groups.values())
    assert ("Slow", "many", 1.0) in kinds and ("Slow", "many", "short", 3.0) in kinds


def test_models_of_rewards_come_and_go_with_a_stop_and_not_while_the_run_goes_on(tmp_path):
    make_models(tmp_path)
    first, second = (f"0.5*model(path={tmp_path}/{name}-judge, name={name})" for name in ("first", "second"))
    keys = keys_of(tmp_path / "runs", tmp_path, ("first",), "checkpoint.every_steps=1", "total_train_steps=4")
    keys = [*keys, f"reward={first} + {SMALL}:even"]
    resolved = load_config(TrainConfig, None, keys)
    train(resolved, until=1)
    folder = folder_of(resolved)
    refused = [ask(folder, Change("reward.add", second)), ask(folder, Change("reward.remove", "first"))]
    ask(folder, Change("reward.weight", "first=2"))
    train(resolved, until=2)
    for name in refused:
        answer = json.loads((folder / FOLDER / f"{name}.answer").read_text())["refused"]
        assert "can be neither added nor removed during a run" in answer and "--override" in answer
    assert rows(folder)[-1]["reward_weights/first"] == 2

    other = load_config(TrainConfig, None, [*keys[:-1], f"reward={second} + {SMALL}:many"])
    with pytest.raises(ConfigError, match="add --override"):
        train(other)
    train(other, override=True, until=3)  # a change of the reward before is none of this one
    train(other)
    last = rows(folder)[-1]
    assert {name for name in last if name.startswith("rewards/")} == {"rewards/second", "rewards/many"}
    assert last["step"] == 4 and "control/changes" not in last


def test_a_change_of_a_run_on_ray_is_refused_before_it_waits(tmp_path, capsys):
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", "reward=exact_number", "runner=ray"]).config
    with RunFolder.open(tmp_path, "sums", "one", command="train", config_text=to_yaml(config)) as folder:
        assert main(["control", str(folder.path), "reward.weight", "exact_number=2"]) == 2
        assert "stop the run, then type: tandem continue" in capsys.readouterr().err
        assert not list(folder.path.glob("control/*"))
