"""`workflow=verifiers` and the process that plays, with a stand-in for the library; tests/foreign has the library itself."""

import asyncio
import sys

import pytest

from tandem.api.failures import DataFailure
from tandem.config.errors import ConfigError
from tandem.rollout.agents import VerifiersWorkflow
from tandem.rollout.recorder import SessionRecorder
from tests.rollout.scripted import GCONFIG, ScriptedEngine, user

STAND_IN = {
    "__init__.py": "",
    "v1/__init__.py": "from types import SimpleNamespace as EvalClientConfig, SimpleNamespace as ModelContext",
    "v1/configs/__init__.py": "",
    "v1/configs/cli/__init__.py": "",
    "v1/configs/cli/eval.py": """
from types import SimpleNamespace
class EvalConfig:
    @staticmethod
    def model_validate(given):
        return SimpleNamespace(env=given["env"])
""",
    "v1/utils/__init__.py": "",
    "v1/utils/loaders.py": """
import asyncio, contextlib, json, urllib.request
from types import SimpleNamespace as Space

class Taskset:
    taskset = ["one", "two", "fails", "raises"]

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        if task == "fails":
            return Space(ok=False, errors=[Space(message="the harness gave up")], traces=[])
        print({"a taskset": "may print"})
        print("[" * 100_000)
        if task == "raises":
            raise KeyError("no such word")
        body = json.dumps({"messages": [{"role": "user", "content": task}]}).encode()
        url, kind = context.client.base_url + "/chat/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, body, kind)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
        rewards = {"right": Space(score=0.5, weight=1.0), "short": Space(score=1.0, weight=0.25)}
        return Space(ok=True, errors=[], traces=[Space(rewards=rewards, errors=[])])

def load_environment(env):
    print("a library may print")
    return Taskset()
""",
}


def test_a_row_is_the_task_of_its_place_and_weighted_rewards_are_the_samples(tmp_path, monkeypatch):
    for name, text in STAND_IN.items():
        (tmp_path / "verifiers" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "verifiers" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def play():
        engine = ScriptedEngine(lambda request, number: "7")
        recorder = SessionRecorder(engine.tokenizer)
        workflow = VerifiersWorkflow(GCONFIG, recorder, taskset="mine", python=sys.executable)
        rows = [{"messages": [user("")], "tandem.index": index} for index in (3, 0, 1, 2, 4)]
        try:
            return await asyncio.gather(*(workflow.arun_episode(engine, row) for row in rows), return_exceptions=True)
        finally:
            recorder.close()

    raised, one, two, failure, five = asyncio.run(play())
    assert [sample.messages[0]["content"] for sample in (one, two, five)] == ["one", "two", "one"]
    assert one.reward == 0.75 and one.rewards == {"right": 0.5, "short": 0.25}
    assert isinstance(failure, DataFailure) and "agent_raised" in str(failure) and "the harness gave up" in str(failure)
    assert isinstance(raised, DataFailure) and "KeyError: 'no such word'" in str(raised)


def test_a_python_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="make an environment with `pip install verifiers uv`"):
        VerifiersWorkflow(GCONFIG, None, taskset="mine", python="no/such/python")
