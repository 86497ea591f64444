"""Environments of other libraries in words. A library that is not here is looked for in the environments that
``scripts/foreign_agents.sh`` makes (``TANDEM_FOREIGN``, or ``envs``): games and tasks in ``games``, a server in ``openenv``.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tandem.api.environment import InvalidAction
from tandem.api.services import Services
from tandem.config.errors import ConfigError
from tandem.config.services import SERVICES
from tandem.config.terms import read_term
from tandem.rollout.environments.worker import Player
from tests.rollout.elsewhere import ERRORS

ENVS = Path(os.environ.get("TANDEM_FOREIGN", Path(__file__).parents[2] / "envs"))
ROOT, GAMES = Path(__file__).parents[2], ENVS / "games"
OPENENV = SERVICES["environment"]["openenv"].factory
FROZEN_LAKE = "gymnasium:FrozenLake-v1(options={'is_slippery': False})"


@contextlib.contextmanager
def player(spec):
    """An environment as a worker process plays it; in another Python if its library is there and not here."""
    term = read_term(spec, "environment")
    service = SERVICES["environment"][term.registered]
    if not service.package or importlib.util.find_spec(service.package):
        yield Player(service.factory, term.arguments)
    elif not (GAMES / "bin/python").is_file():
        pytest.skip(f"{service.package} is neither here nor in {GAMES}; scripts/foreign_agents.sh makes it")
    else:
        with Elsewhere(service.factory, term.arguments) as made:
            yield made


class Elsewhere:
    """A player in the environment of the games."""

    def __init__(self, factory, knobs):
        command = [str(GAMES / "bin/python"), str(ROOT / "tests/rollout/elsewhere.py"), factory, json.dumps(knobs)]
        path = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=path)

    def __enter__(self):
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def do(self, operation, **arguments):
        self.process.stdin.write(json.dumps({"operation": operation, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        answer = json.loads(next(line for line in self.process.stdout if line.startswith("{")))
        if "error" in answer:
            raise ERRORS[answer["error"]](answer["words"])
        return answer["result"]


def test_frozen_lake_is_a_picture_and_moves_are_words():
    with player(FROZEN_LAKE) as lake:
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
    with player(f"gymnasium:{name}") as world:
        assert says in world.do("reset", data={}, seed=3)["observation"]
        assert isinstance(world.do("step", action=move)["reward"], float)
        world.do("close")


def test_actions_of_a_world_that_counts_from_one_are_its_numbers_or_names():
    gymnasium = pytest.importorskip("gymnasium")
    worlds = pytest.importorskip("tandem.rollout.environments.gymnasium_text")

    class Doors(gymnasium.Env):
        action_space, observation_space = gymnasium.spaces.Discrete(3, start=1), gymnasium.spaces.Discrete(4)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return action, 0.0, False, False, {}

    gymnasium.register("Doors-v0", entry_point=Doors, disable_env_checker=True)
    for names, actions in ((None, {"1": 1, "3": 3}), ("a b c", {"a": 1, "C": 3, "2": 2})):
        world = worlds.GymnasiumText("Doors-v0", actions=names)
        world.reset({}, 0)
        for word, number in actions.items():
            assert world.step(word).observation == f"You observe {number}."
        for word in ("0", "4"):
            with pytest.raises(InvalidAction):
                world.step(word)


@pytest.mark.parametrize(
    ("name", "words"),
    [("FrozenLak-v1", "cannot be made"), ("Pendulum-v1", "only numbered actions"), (f"{'x' * 5}", "cannot be made")],
)
def test_what_cannot_be_said_in_words_is_refused(name, words):
    with pytest.raises(ConfigError, match=words), player(f"gymnasium:{name}"):
        pass


@pytest.mark.skipif(importlib.util.find_spec("textarena") is not None, reason="the library is there")
def test_a_missing_library_says_what_to_install():
    with (
        Services({"environment": "textarena:GuessTheNumber-v0"}) as services,
        pytest.raises(ConfigError, match=r"environment 'textarena' needs a library that is missing: .*\[textarena\]"),
    ):
        services.get("environment")


def test_a_game_of_textarena_says_only_what_is_new():
    with player("textarena:GuessTheNumber-v0(options={'max_number': 9})") as game:
        assert "between 1 and 9" in game.do("reset", data={}, seed=3)["observation"]
        said, step = [], {"terminated": False}
        for guess in range(9, 0, -1):
            step = game.do("step", action=guess)
            said.append(step["observation"])
            if step["terminated"]:
                break
        assert step["reward"] == 1 and step["accuracy"] == 1 and "Congratulations" in said[-1]
        assert set(said[:-1]) <= {"The target number is lower."}
    with pytest.raises(ConfigError, match="one player"), player("textarena:TicTacToe-v0"):
        pass


def test_a_task_of_skyrl_gym_is_judged_by_the_rows_answer():
    with player("skyrl_gym:gsm8k") as task:
        row = {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
        assert task.do("reset", data=row, seed=0) == {"observation": ""}
        assert task.do("step", action="So #### 2") | {"accuracy": None} == {
            "observation": "", "reward": 1.0, "terminated": True, "truncated": False, "accuracy": None
        }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"), player("skyrl_gym:gsm8"):
        pass


def test_a_task_of_reasoning_gym_earns_what_an_answer_adds_to_the_best():
    with player("reasoning_gym:chain_sum(tries=2, options={'min_terms': 2, 'max_terms': 2})") as task:
        questions = [task.do("reset", data={}, seed=seed)["observation"] for seed in (5, 6, 5)]
        assert questions[0] == questions[2] != questions[1]
        question = questions[0]
        one, sign, other = re.search(r"(-?\d+) ([+-]) (-?\d+)", question).groups()
        right = int(one) + (int(other) if sign == "+" else -int(other))
        first, second = (task.do("step", action=answer) for answer in ("nothing of the kind", right))
        assert first["observation"] == "That is not right. Try again." and not first["terminated"]
        assert second["terminated"] and second["accuracy"] == 1 and first["reward"] + second["reward"] == pytest.approx(1)
        task.do("reset", data={}, seed=5)
        assert [task.do("step", action="x")["terminated"] for _ in range(2)] == [False, True]
    with player("reasoning_gym:chain_sum(tries=3, options={'min_terms': 2, 'max_terms': 2})") as task:
        task.do("reset", data={}, seed=5)
        earned = [task.do("step", action=answer)["reward"] for answer in (f"{right} or so", "x", f"{right} or so")]
        assert earned[0] > 0 and earned[1:] == [0, 0], "only what is above the best"
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"), player("reasoning_gym:chain_sun"):
        pass


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
    python = ENVS / "openenv/bin/python"
    if not python.is_file():
        pytest.skip(f"{python} is not there; scripts/foreign_agents.sh makes it")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(python), str(tmp_path / "server.py"), str(port)], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        players = [Player(OPENENV, {"id": f"127.0.0.1:{port}", "action": "number"}) for _ in range(8)]
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
