"""Environments of other libraries in words. Each test needs its library; `openenv` a server in an environment of its own."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tandem.api.environment import InvalidAction
from tandem.api.services import Services, factory_of
from tandem.config.errors import ConfigError
from tandem.config.terms import read_term
from tandem.rollout.environments.worker import Player

FROZEN_LAKE = "gymnasium:FrozenLake-v1(options={'is_slippery': False})"


def player(spec):
    """As a worker process would play it."""
    term = read_term(spec, "environment")
    make = factory_of("environment", term.name)
    return Player(f"{make.__module__}:{make.__name__}", term.arguments)


def test_frozen_lake_is_a_picture_and_moves_are_words():
    pytest.importorskip("gymnasium")
    lake = player(FROZEN_LAKE)
    first = lake.do("reset", data={}, seed=1)["observation"]
    assert first.startswith("P . . .\n. H . H\n") and first.endswith("Your moves: left, down, right, up.")
    with pytest.raises(InvalidAction, match="Your moves: left"):
        lake.do("step", action="jump")
    for move in ("down", "Down.", "right", "1", "right"):
        assert lake.do("step", action=move)["reward"] == 0
    last = lake.do("step", action="right")
    assert last["terminated"] and last["reward"] == 1 and last["observation"] == "You reached the goal."
    assert lake.do("reset", data={}, seed=1)["observation"] == first
    lake.do("close")


@pytest.mark.parametrize(
    ("name", "says", "move"),
    [
        ("Taxi-v4", "The taxi is at row", "north"),
        ("Blackjack-v1", "Your cards sum to", "hit"),
        ("CliffWalking-v1", "C the cliff", "up"),
        ("CartPole-v1(actions='left right')", "You observe [", "left"),
    ],
)
def test_other_worlds_of_gymnasium_have_words_too(name, says, move):
    pytest.importorskip("gymnasium")
    world = player(f"gymnasium:{name}")
    assert says in world.do("reset", data={}, seed=3)["observation"]
    assert isinstance(world.do("step", action=move)["reward"], float)
    world.do("close")


@pytest.mark.parametrize(
    ("name", "words"),
    [("FrozenLak-v1", "cannot be made"), ("Pendulum-v1", "only a few numbered ones"), (f"{'x' * 5}", "cannot be made")],
)
def test_what_cannot_be_said_in_words_is_refused(name, words):
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=words):
        player(f"gymnasium:{name}")


@pytest.mark.skipif(importlib.util.find_spec("textarena") is not None, reason="the library is there")
def test_a_missing_library_says_what_to_install():
    with (
        Services({"environment": "textarena:GuessTheNumber-v0"}) as services,
        pytest.raises(ConfigError, match=r"environment 'textarena' needs a library that is missing: .*\[textarena\]"),
    ):
        services.get("environment")


def test_a_game_of_textarena_says_only_what_is_new():
    pytest.importorskip("textarena")
    game = player("textarena:GuessTheNumber-v0(options={'max_number': 9})")
    assert "between 1 and 9" in game.do("reset", data={}, seed=3)["observation"]
    said, step = [], {"terminated": False}
    for guess in range(9, 0, -1):
        step = game.do("step", action=guess)
        said.append(step["observation"])
        if step["terminated"]:
            break
    assert step["reward"] == 1 and step["accuracy"] == 1 and "Congratulations" in said[-1]
    assert set(said[:-1]) <= {"The target number is lower."}
    with pytest.raises(ConfigError, match="one player"):
        player("textarena:TicTacToe-v0")


def test_a_task_of_skyrl_gym_is_judged_by_the_rows_answer():
    pytest.importorskip("skyrl_gym")
    task = player("skyrl_gym:gsm8k")
    row = {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
    assert task.do("reset", data=row, seed=0) == {"observation": ""}
    assert task.do("step", action="So #### 2") | {"accuracy": None} == {
        "observation": "", "reward": 1.0, "terminated": True, "truncated": False, "accuracy": None
    }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        player("skyrl_gym:gsm8")


SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Told(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.wanted = 0
    def reset(self, seed=None, episode_id=None, **more):
        self.wanted = 1 + (seed or 0) % 9
        return Told(text="Guess.", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **more):
        right = action.number == self.wanted
        return Told(text="Right." if right else "No.", done=right, reward=float(right))
    @property
    def state(self):
        return State()

app = create_app(Game, Guess, Told, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.slow
def test_sessions_of_an_openenv_server_play_beside_each_other(tmp_path):
    python = os.environ.get("OPENENV_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("OPENENV_PYTHON names no interpreter that has openenv-core")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, str(tmp_path / "server.py"), str(port)], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        players = [player(f"openenv:127.0.0.1:{port}(action=number)") for _ in range(8)]
        assert [one.do("reset", data={}, seed=i) for i, one in enumerate(players)] == [{"observation": "Guess."}] * 8
        with pytest.raises(InvalidAction):
            players[0].do("step", action="many")
        for seed, one in enumerate(players):
            steps = [one.do("step", action=number) for number in (9, seed + 1)]
            assert [(s["observation"], s["reward"], s["terminated"]) for s in steps] == [
                ("No.", 0.0, False), ("Right.", 1.0, True)
            ]  # fmt: skip
            one.do("close")
    finally:
        server.terminate()
        server.wait(20)
    with pytest.raises((ConnectionError, asyncio.TimeoutError, OSError)):
        players[0].do("reset", data={}, seed=0)
