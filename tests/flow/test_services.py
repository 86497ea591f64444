"""Services by name: one spelling for all of them, given by argument name, made once, and closed in reverse order."""

import asyncio
import json

import pytest
import yaml

from tandem.api.services import Services
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, to_yaml
from tandem.config.services import SERVICES, Service, register
from tandem.config.terms import read_terms
from tandem.flow.services import check_names, make_workflow
from tandem.trainers.loop import train
from tests.trainers.conftest import model, overrides  # noqa: F401  the fixtures of a tiny run

SOURCE = '''
import asyncio
from pathlib import Path

from tandem import ChatWorkflow, LLMRequest, RewardFn, RewardResult
from tandem.api.environment import Environment, StepResult
from tandem.config.rollout import GenerationConfig
from tandem.rollout.workflows import RLVRWorkflow

NOTES = Path(__file__).with_name("notes")


def note(text):
    with NOTES.open("a") as file:
        file.write(text + "\\n")


class Sandbox:
    def __init__(self, *, seconds: float = 1.0):
        note(f"sandbox made {seconds}")

    def close(self):
        note("sandbox closed")


class Judge:
    """A service that asks for another one."""

    def __init__(self, sandbox, tokenizer, *, word: str = "0"):
        self.word, self.tokenizer = word, tokenizer
        note(f"judge made {word}")

    async def share(self, text):
        return text.count(self.word) / max(1, len(text))

    async def close(self):
        note("judge closed")


class World(Environment):
    """Counts the turns of one episode."""

    def __init__(self, *, turns: int = 2):
        self.turns = turns

    async def reset(self, data, seed):
        self.left = self.turns
        return "go on", {}

    async def step(self, action):
        self.left -= 1
        return StepResult("go on", float(len(action) % 2), self.left == 0, False, {})

    async def close(self):
        note("world closed")


class Broken:
    def __init__(self):
        raise RuntimeError("no such maze")


class Player:
    def __init__(self, gconfig):
        self.gconfig = gconfig

    async def act(self, chat, observation):
        return chat.completion


class Mine(RewardFn):
    def __init__(self, judge, *, factor: float = 1.0):
        self.judge, self.factor = judge, factor
        note("reward made")

    async def __call__(self, *, completion, **rest):
        return RewardResult(self.factor * await self.judge.share(completion))

    def close(self):
        note("reward closed")


class Plays(ChatWorkflow):
    def __init__(self, environment, agent, judge, *, bonus: float = 0.5, **rest):
        super().__init__(**rest)
        self.environment, self.agent, self.judged_by, self.bonus = environment, agent, judge, bonus
        note("workflow made")

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        total, done = 0.0, False
        async with self.environment() as world:
            said, _ = await world.reset(data, 0)
            while not done:
                await self.reply(engine, chat)
                step = await world.step(await self.agent.act(chat, said))
                total, done = total + step.reward, step.terminated
                if not done:
                    chat.say(step.observation)
        result = await self.judge(chat, data)
        return chat.sample(total + result.value + self.bonus * await self.judged_by.share(chat.completion))


class Lines:
    def __init__(self, run, *, file: str = "lines"):
        self.path = run.folder / file

    def log(self, step, metrics):
        with self.path.open("a") as file:
            file.write(f"{step}\\n")

    def close(self):
        pass


async def says(text, *, word: str = "0"):
    return float(word in text)


class AsksThePolicy:
    """A judge that lets the run's own model speak."""

    def __init__(self, engine, tokenizer):
        self.engine, self.tokenizer = engine, tokenizer

    async def share(self, text):
        request = LLMRequest(tuple(self.tokenizer.encode("Good?")), GenerationConfig(max_new_tokens=2, greedy=True))
        return float(len((await self.engine.agenerate(request)).output_ids))


class Circle:
    def __init__(self, judge):
        pass


class Wants(RLVRWorkflow):
    def __init__(self, reward, gconfig, tokenizer, juge):
        pass


class Knows(RLVRWorkflow):
    def __init__(self, *, depth: int = 1, hints: str = "", careful=False, **rest):
        super().__init__(**rest)
        self.depth, self.hints = depth, hints
'''


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def config(*items):
    return load_config(TrainConfig, None, ["train_dataset.path=addition", *items]).config


def test_a_workflow_plays_with_a_users_services_made_once_and_closed_in_reverse(
    overrides,  # noqa: F811
    mine,
    tmp_path,
):
    written = {
        "environment": {"name": f"{mine}:World", "turns": 2},
        "agent": f"{mine}:Player",
        "judge": f"{mine}:Judge(word=1)",
        "sandbox": {"name": f"{mine}:Sandbox", "seconds": 2},
        "workflow": {"name": f"{mine}:Plays", "bonus": 0.25},
        "tracking": {"sinks": [{"name": f"{mine}:Lines", "file": "steps"}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    keys = [*overrides, f"reward={mine}:Mine(factor=2)", "total_train_steps=2", "rollout.batch_size=2"]
    summary = train(load_config(TrainConfig, tmp_path / "run.yaml", keys))

    assert (summary.folder / "steps").read_text() == "1\n2\n"
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes.count("world closed") == 1 + 2 * 2 * 4  # one on trial, and one for each episode
    order = [line for line in notes if line != "world closed"]
    assert order.count("judge made 1") == order.count("sandbox made 2.0") == order.count("reward made") == 1
    assert order[-3:] == ["reward closed", "judge closed", "sandbox closed"]
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert any(row["reward/mean"] > 0 for row in rows)


def test_a_judge_may_ask_the_engine_of_the_run(overrides, mine):  # noqa: F811
    keys = [*overrides, f"reward={mine}:Mine", f"judge={mine}:AsksThePolicy", "total_train_steps=1"]
    assert train(load_config(TrainConfig, None, keys)).metrics["reward/mean"] == 2.0


def test_a_later_service_is_one_file_and_one_registration(mine):
    register(Service("environment", "counting", "tests.flow.counting_world:CountingWorld"))
    try:
        settings = config("environment=counting:maze-v1", f"workflow={mine}:Knows")
        services = Services(dict.fromkeys(["environment"], settings.environment))
        assert services.get("environment").make().id == "maze-v1"
        with pytest.raises(ConfigError, match="did you mean 'counting'"):
            Services({"environment": "countign"}).get("environment")
    finally:
        del SERVICES["environment"]["counting"]


def test_an_environment_is_tried_before_the_run_and_closed(mine, tmp_path):
    async def ask():  # also where a loop runs, as in a notebook
        return Services({"environment": f"{mine}:World"}).get("environment")

    asyncio.run(ask())
    assert (tmp_path / "notes").read_text() == "world closed\n"
    with pytest.raises(ConfigError, match="no such maze"):
        Services({"environment": f"{mine}:Broken"}).get("environment")


def test_an_async_function_is_a_service_with_knobs(mine):
    judge = Services({"judge": f"{mine}:says(word=7)"}).get("judge")
    assert asyncio.run(judge("3 + 4 = 7")) == 1.0
    with pytest.raises(ConfigError, match="did you mean 'word'"):
        Services({"judge": f"{mine}:says(wrod=7)"}).get("judge")


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["workflow=FILE:Wants"], r"workflow=.*:Wants asks for 'juge', which nobody gives it; did you mean 'judge'"),
        (["workflow=FILE:Plays"], r":Plays asks for 'environment', and the configuration names none: set environment="),
        (["workflow=FILE:Knows", "workflow_args.dpeth=3"], r"has no knob 'dpeth'; did you mean 'depth'"),
        (["workflow=FILE:Knows(depth=deep)"], r"depth must be a whole number, got 'deep'"),
        (["workflow=FILE:Knows", "workflow_args.careful=very"], r"careful must be true or false, got 'very'"),
        (["workflow=multi_turn", "workflow_args.max_turns=abc"], r"max_turns must be a whole number, got 'abc'"),
        (["workflow={name: multi_turn, maxturns: 3}"], r"did you mean 'max_turns'"),
        (["workflow=tools"], r"workflow=tools needs 'tools'; set workflow_args.tools=…"),
        (["environment=FILE:Circle"], r"nobody asks for 'environment'.*; workflow=environment asks for it"),
        (["judge=FILE:Circle", "workflow=FILE:Knows"], r"judge=.* is set, and nobody asks for 'judge'"),
        (["judge=nothing", "reward=FILE:Mine"], r"no judge is called 'nothing'; give one of your own as my_file.py:Name"),
        (["sandbox=FILE:Circle", "judge=FILE:Judge", "reward=FILE:Mine"], r"judge and sandbox ask for each other"),
        (["judge=FILE:Judge(word=1, w=2)", "sandbox=FILE:Sandbox", "reward=FILE:Mine"], r"no knob 'w'; did you mean 'word'"),
        (
            ["judge=FILE:Judge(sandbox=x)", "sandbox=FILE:Sandbox", "reward=FILE:Mine"],
            r"sandbox is no knob: the run passes it",
        ),
        (["tracking.sinks=[FILE:Lines(fiel=x)]"], r"no knob 'fiel'; did you mean 'file'"),
        (["reward=FILE:Mine(factor=much)"], r"factor must be a number, got 'much'"),
    ],
)
def test_who_asks_for_what_nobody_has_is_refused_before_there_is_a_run_folder(
    overrides,  # noqa: F811
    mine,
    tmp_path,
    items,
    words,
):
    items = [item.replace("FILE", str(mine)) for item in items]
    with pytest.raises(ConfigError, match=words):
        train(load_config(TrainConfig, None, [*overrides, *items]))
    assert not (tmp_path / "tandem").exists()


def test_the_spellings_of_a_service_say_the_same(tmp_path, mine):
    workflow = "{name: multi_turn, max_turns: 5, retry_message: 'a (b)'}"
    (tmp_path / "a.yaml").write_text(f"train_dataset: {{path: addition}}\nworkflow: {workflow}")
    one = load_config(TrainConfig, tmp_path / "a.yaml").config
    two = config("workflow=multi_turn(max_turns=5, retry_message='a (b)')")
    three = config("workflow=multi_turn", "workflow_args.max_turns=5", "workflow_args.retry_message=a (b)")
    for settings in (one, two, three):
        made = make_workflow(settings, Services(tokenizer=None), None, settings.gconfig)
        assert (made.max_turns, made.retry_message) == (5, "a (b)")
    (tmp_path / "b.yaml").write_text(to_yaml(one))
    assert load_config(TrainConfig, tmp_path / "b.yaml").config == one
    sources = f"train_dataset.sources=[{{path: {tmp_path}, reward: {{name: length, target_tokens: 8}}}}]"
    mapped = config("reward={name: length, target_tokens: 9}", "train_dataset.path=null", sources)
    assert (mapped.reward, mapped.train_dataset.sources[0].reward) == ("length(target_tokens=9)", "length(target_tokens=8)")
    assert [term.name for term in read_terms("math + 0.5*remote:helpful-v1.2 - gymnasium:Taxi-v3(size=3)")] == [
        "math",
        "remote:helpful-v1.2",
        "gymnasium:Taxi-v3",
    ]


def test_a_workflow_of_rest_is_given_what_its_base_takes_and_its_knobs_are_read(mine):
    made = config(f"workflow={mine}:Knows", "workflow_args.depth=3", "workflow_args.hints=5")
    workflow = make_workflow(made, Services(tokenizer=None), None, made.gconfig)
    assert (workflow.depth, workflow.hints) == (3, "5")
    check_names(made)


def test_services_are_closed_in_reverse_also_after_one_that_fails_to_close(caplog):
    closed = []

    class Closes:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            if self.name == "two":
                raise OSError("gone")
            if self.name == "three":
                raise SystemExit(3)

    services = Services()
    for name in ("one", "two", "three"):
        services.keep(Closes(name))
    services.close()
    services.close()
    assert closed == ["three", "two", "one"]
    assert "a Closes did not close: OSError: gone" in caplog.text  # the work is done: no reason to fail the run


def test_what_somebody_was_given_is_known():
    with Services(engine="the engine", tokenizer="its tokenizer") as services:
        services.make("reward=first", lambda tokenizer: tokenizer, {})
        assert services.asked == {"tokenizer"}
        services.make("judge=second", lambda engine, tokenizer: engine, {})
        assert services.asked == {"engine", "tokenizer"}
