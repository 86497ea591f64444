"""Environments of a run: one that takes its time, and one that fails now and then."""

import os
import random
import time


class Dawdles:
    """What it shows and pays follows from its seed and from what it is told; how long it takes does not."""

    def reset(self, data, seed):
        self.draw, self.left = random.Random(seed), 1 + seed % 3
        return f"{self.draw.randint(0, 99)}?"

    def step(self, action):
        time.sleep(random.SystemRandom().uniform(0.0, 0.03))
        self.left -= 1
        return f"{self.draw.randint(0, 99)}!", (len(action) % 3) / 2, self.left == 0


class Fails:
    """One episode in four goes wrong, each time in another way."""

    def reset(self, data, seed):
        self.way = random.Random(seed).choice(["raises", "dies", "nan", "shape"] + ["fine"] * 12)
        return "Go."

    def step(self, action):
        if self.way == "raises":
            raise ValueError("a hole in the floor")
        if self.way == "dies":
            os._exit(9)
        if self.way == "shape":
            return "only this"
        return "Go on.", float("nan") if self.way == "nan" else len(action) % 2, len(action) % 2 == 0
