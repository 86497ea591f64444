"""Environments that play, and environments that fail in every way there is."""

import contextlib
import os
import sys
import time
from pathlib import Path

from tandem.api.environment import InvalidAction, StepResult


class Count:
    """Counts what it is told. The first words depend on the seed."""

    def __init__(self, *, turns: int = 3, step: float = 1.0):
        self.turns, self.worth = turns, step

    def reset(self, data, seed):
        self.left = self.turns
        return f"Begin with {seed % 10}.", {"seed": seed}

    def step(self, action):
        if action == "nonsense":
            raise InvalidAction("No such move.")
        self.left -= 1
        info = {"accuracy": 1.0} if self.left == 0 else {}
        return StepResult(f"You said {action}. {self.left} left.", self.worth, self.left == 0, False, info)


class Async:
    """The same, of coroutines, in three fields."""

    async def reset(self, **given):
        self.left = 2
        return f"row {given['data']['tandem.index']}, seed {given['seed']}"

    async def step(self, action):
        self.left -= 1
        return "on", 0.5, self.left == 0


class Gym:
    """A world with the methods of gymnasium."""

    def reset(self, *, seed=None, options=None):
        return f"{seed} {options['answer']}", {}

    def step(self, action):
        return "end", 1, True, False, {}


class Says:
    """Answers each action by what the row says of it: words, reward, terminated, truncated, and info."""

    def reset(self, data):
        self.steps = iter(data["steps"])
        return "Begin."

    def step(self, action):
        words, reward, terminated, truncated, info = next(self.steps)
        return words, reward, terminated, truncated, info


class Fails:
    """Does what the row says, in `reset` or in `step`."""

    def __init__(self, *, notes: str = ""):
        self.notes = notes

    def reset(self, data, seed):
        self.does = data.get("does", "plays")
        if self.does == "hangs in reset":
            time.sleep(1000)
        return "Go on."

    def step(self, action):
        match self.does:
            case "hangs":
                time.sleep(1000)
            case "raises":
                raise ValueError("a wall that is none")
            case "exits":
                sys.exit("enough")
            case "dies":
                os._exit(3)
            case "nan":
                return "x", float("nan"), True
            case "words for a reward":
                return "x", "much", True
            case "no text":
                return 3, 0.0, True
            case "four":
                return "x", 0.0, True, False
            case "no flag":
                return "x", 0.0, "yes"
            case "floods":
                return "x" * 1_000_000, 0.0, True
            case "leaks":
                self.leak = bytearray(os.urandom(1)) * (300 << 20)
        return "Well.", 1.0, True

    def close(self):
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write(f"{os.getpid()}\n")


class Broken:
    def __init__(self):
        raise RuntimeError("no such maze")


class Who:
    """Says in which process it lives."""

    def reset(self, data, seed):
        return str(os.getpid())

    def step(self, action):
        return f"torch: {'torch' in sys.modules}", 0.0, True


class Forges:
    """Writes an answer of its own into every pipe that it finds."""

    def reset(self, data):
        return "Begin."

    def step(self, action):
        made = b'{"observation": "forged", "reward": 9.0, "terminated": true, "truncated": false, "accuracy": 1.0}'
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, len(made).to_bytes(8, "big") + made)
        return "end", 0.0, True
