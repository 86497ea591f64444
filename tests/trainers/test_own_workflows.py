"""Workflows and rewards of the user's own: what they are given, whole groups, and what is said when they are wrong."""

import asyncio

import pytest

from tandem.api.failures import DataFailure, UserCodeFailed, WrongWorkflow
from tandem.api.services import Services
from tandem.api.workflow import Group, RolloutWorkflow, Sample
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import open_rows, validation_config
from tandem.flow.plan import plan_run
from tandem.flow.services import check_names, make_reward, make_workflow, training_workflow
from tandem.rewards.build import build_reward
from tandem.rollout.groups import WholeGroup
from tandem.rollout.workflows import Repeated
from tandem.trainers.loop import train
from tests.rollout.clockwork import ClockworkEngine
from tests.trainers.evaluating import evaluate

SOURCE = """
from tandem.api.workflow import Group
from tandem.api.workflow import RewardFn, RolloutWorkflow
from tandem.rollout.workflows import ChatWorkflow, RLVRWorkflow

number = 3


class Whole(ChatWorkflow):
    makes_group = True

    async def arun_episode(self, engine, data):
        chats = [self.start(data) for _ in range(self.gconfig.n_samples)]
        for i, chat in enumerate(chats):
            await self.reply(engine.for_sample(i), chat)
        return Group(tuple(chat.sample(float(len(chat.completion) % 2)) for chat in chats))


class Undeclared(Whole):
    makes_group = False


class Needs(RLVRWorkflow):
    def __init__(self, reward, gconfig, tokenizer, judge_model):
        pass


class TakesAll(RolloutWorkflow):
    def __init__(self, **given):
        self.given = given

    async def arun_episode(self, engine, data):
        return None


class Raises(TakesAll):
    def __init__(self, reward):
        raise KeyError("no such file")


class NoWorkflow:
    pass


class Abstract(RolloutWorkflow):
    pass


def not_async(engine, data):
    return None


async def bare(engine, data):
    return None


async def backwards(*, data, engine):
    return None


class Yields(TakesAll):
    async def arun_episode(self, engine, data):
        yield 1


class TakesNothing(TakesAll):
    async def arun_episode(self):
        return None


class FinishesAtOnce(TakesAll):
    def finish_group(self, samples, data):
        return samples


class NotAsync(RewardFn):
    def __call__(self, **given):
        return 1.0


class TakesAPrompt(RewardFn):
    async def __call__(self, prompt):
        return 1.0


class Counts(RewardFn):
    async def __call__(self, **given):
        return 1.0

    def check_row(self, row):
        raise ValueError("no")

    def metrics(self):
        return {"many": "x"}


def gives_several(completion):
    yield 1.0


class NoStep:
    def reset(self, data, seed):
        return "go"


class Hangs(RewardFn):
    async def __call__(self, **given):
        import asyncio
        await asyncio.sleep(60)
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def config(*items):
    return load_config(TrainConfig, None, ["train_dataset.path=addition", *items]).config


def in_training(*items):
    made = config(*items)
    return training_workflow(made, plan_run(made), Services(tokenizer=None), make_reward(made))


@pytest.mark.parametrize(
    ("name", "items", "words"),
    [
        (
            "Needs",
            [],
            r"asks for 'judge_model', which nobody gives it; did you mean 'judge'\? There are: .*gconfig",
        ),
        ("not_async", [], r"has the argument engine or data.*write `async def`"),
        ("backwards", [], r"must take \(engine, data\) first"),
        ("number", [], r"it is a int"),
        ("bare", ["system_prompt=Be brief."], r"system_prompt is set, but .* has no argument 'system_prompt'"),
        ("bare", ["gconfig.temperature=0.5"], r"gconfig.temperature is set, but .* has no argument 'gconfig'"),
        ("bare", ["reward=exact_number"], r"reward is set, but .* has no argument 'reward'"),
    ],
)
def test_a_workflow_that_cannot_be_made_or_would_ignore_a_key_is_refused_at_start(mine, name, items, words):
    with pytest.raises(ConfigError, match=words):
        check_names(config(f"workflow={mine}:{name}", *items))


def test_knobs_of_a_workflow_are_given_in_its_name_or_beside_it_and_reach_it(mine):
    own, multi_turn = (
        config(f"workflow={mine}:TakesAll", "workflow_args.depth=3"),
        config("workflow=multi_turn(max_turns=5)"),
    )
    assert make_workflow(own, Services(tokenizer=None), None, own.gconfig).given["depth"] == 3
    assert make_workflow(multi_turn, Services(tokenizer=None), None, multi_turn.gconfig).max_turns == 5
    for items, words in (
        (["workflow=multi_turn", "workflow_args.maxturns=5"], "did you mean 'max_turns'"),
        (["workflow=multi_turn(max_turns=2)", "workflow_args.max_turns=5"], "both give max_turns"),
        (["workflow=rlvr", "workflow_args.max_turns=5"], "it has: none"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_names(config(*items))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", r"raised KeyError: 'no such file' \(mine.py:\d+ in __init__: "),
        ("NoWorkflow", "which is no workflow; derive the class"),
        ("Abstract", "has no method arun_episode, which every RolloutWorkflow has"),
        ("Yields", r"write `async def arun_episode\(self, engine, data\)`: the function is not async, or has a `yield`"),
        ("TakesNothing", r"write `async def arun_episode\(self, engine, data\)`: too many positional arguments"),
        ("FinishesAtOnce", r"write `async def finish_group\(self, samples, data\)`: the function is not async"),
    ],
)
def test_a_constructor_that_fails_is_a_message_with_its_line(mine, name, words):
    with pytest.raises(ConfigError, match=words):
        in_training(f"workflow={mine}:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NotAsync", r"write `async def __call__\(self, \*, prompt, .*`: the function is not async"),
        ("TakesAPrompt", r"write `async def __call__\(self, \*, prompt, .*`: got an unexpected keyword argument"),
        ("gives_several", "has a `yield`, so a call gives no reward but a generator"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_at_start(mine, name, words):
    with pytest.raises(ConfigError, match=words):
        make_reward(config(f"reward={mine}:{name}"))


def test_what_a_reward_object_checks_and_counts_is_held_to_its_form(mine):
    reward = build_reward(f"{mine}:Counts", timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"mine.py:Counts' raised ValueError: no \(mine.py:\d+ in "):
        reward.check_row({})
    with pytest.raises(UserCodeFailed, match=r"metrics\(\) must give a dict of names and numbers, it gave {'many': 'x'}"):
        reward.metrics()


def test_an_environment_without_a_method_is_refused_at_start(model, tmp_path, mine):
    keys = [f"environment={mine}:NoStep", "workflow=environment", "train_dataset.path=seeds", "train_dataset.size=4"]
    with pytest.raises(ConfigError, match=r"mine.py:NoStep has no method 'step'; add it"):
        train(load_config(TrainConfig, None, [f"actor.path={model}", f"run.root={tmp_path}", *keys]))


def test_a_workflow_that_takes_any_argument_is_given_all_of_them(mine):
    made = in_training(f"workflow={mine}:TakesAll")
    assert set(made.workflow.given) == {"reward", "gconfig", "tokenizer", "system_prompt", "chat_template_kwargs"}


@pytest.mark.parametrize(
    ("text", "line"), [("x = 1\ny = zero\n", 2), ("def broken(:\n", 1), ("import sys\n\nsys.exit(5)\n", 3)]
)
@pytest.mark.parametrize("key", ["workflow", "reward", "algorithm.advantage"])
def test_a_file_of_the_user_s_that_raises_is_a_message_with_its_line(tmp_path, text, line, key):
    file = tmp_path / f"broken_{line}.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"raised (\w+Error|SystemExit): .*(, line |:){line}\b.*\); mend it there"):
        {"reward": make_reward, "workflow": check_names}.get(key, plan_run)(config(f"{key}={file}:anything"))


@pytest.mark.parametrize("key", ["algorithm.advantage", "algorithm.filter", "algorithm.correction.reject"])
def test_a_part_of_the_algorithm_that_is_no_function_is_refused_at_start(mine, key):
    with pytest.raises(ConfigError, match="must be a function, got a value of type int"):
        plan_run(config(f"{key}={mine}:number"))


def test_a_workflow_that_makes_the_whole_group_is_trained_and_evaluated(overrides, mine):
    items = [*overrides, f"workflow={mine}:Whole", "evaluate.every_steps=3", "total_train_steps=2", "reward=math"]
    summary = train(load_config(TrainConfig, None, items))
    assert summary.metrics["episodes/trained"] == 8
    assert set(summary.evaluations) == {0, 2}
    assert all(0 <= accuracy <= 1 for accuracy in summary.evaluations.values())


def test_a_greedy_baseline_is_refused_beside_a_workflow_that_makes_whole_groups(mine):
    with pytest.raises(ConfigError, match=r"greedy answer of one sample, and .* makes a whole group"):
        in_training("algorithm=remax", f"workflow={mine}:Whole")


def test_a_group_from_a_workflow_of_one_sample_ends_the_run_and_names_the_remedy(overrides, mine):
    with pytest.raises(ConfigError, match=r"Undeclared returned a group of 4 samples.*makes_group = True"):
        train(load_config(TrainConfig, None, [*overrides, f"workflow={mine}:Undeclared"]))


class Returns(RolloutWorkflow):
    def __init__(self, result):
        self.result = result

    async def arun_episode(self, engine, data):
        return self.result


SAMPLE = Sample((), 1.0)


@pytest.mark.parametrize(
    ("workflow", "error", "words"),
    [
        (Repeated(Returns(3), 2), WrongWorkflow, "returned a int"),
        (WholeGroup(Returns(SAMPLE)), WrongWorkflow, "says `makes_group = True`, and returned a Sample"),
        (WholeGroup(Returns(Group((SAMPLE,))), 2), DataFailure, "group_too_small"),
        (WholeGroup(Returns(None)), DataFailure, "workflow_returned_none"),
    ],
)
def test_what_a_workflow_must_return(workflow, error, words):
    with pytest.raises(error, match=words):
        asyncio.run(workflow.arun_episode(None, {}))


def test_a_row_counts_once_in_an_evaluation_however_many_samples_it_has():
    rows = [{"messages": []}, {"messages": []}]
    with pytest.raises(WrongWorkflow):
        evaluate(ClockworkEngine(), Repeated(Returns(Group((SAMPLE, SAMPLE))), 1), rows)


def test_a_reward_object_of_the_user_s_is_held_to_the_deadline(mine):
    reward = make_reward(config(f"reward={mine}:Hangs", "reward_timeout_s=0.1"))
    given = {"prompt": "", "completion": "", "prompt_ids": (), "completion_ids": (), "row": {}}
    with pytest.raises(DataFailure, match="reward_timeout"):
        asyncio.run(reward(**given))


def test_validation_rows_of_training_data_are_read_as_those_unless_told_otherwise():
    train_keys = ["train_dataset.prompt_suffix= Think.", "train_dataset.max_rows=9", "evaluate.every_steps=1"]
    rows = open_rows(config(*train_keys)).valid
    assert len(rows) == 16 and rows[0]["messages"][-1]["content"].endswith(" Think.")

    rows = open_rows(config(*train_keys, "valid_dataset.prompt_suffix=''", "valid_dataset.size=5")).valid
    assert len(rows) == 5 and not rows[0]["messages"][-1]["content"].endswith(" Think.")
    assert len(open_rows(config(*train_keys, "valid_dataset.max_rows=3")).valid) == 3
    assert len(open_rows(config(*train_keys, "evaluate.max_rows=2")).valid) == 2
    assert validation_config(config(*train_keys, "valid_dataset.path=addition")).prompt_suffix == ""
    assert validation_config(config(*train_keys, "valid_dataset.answer_column=a")).answer_column == "a"
