"""An environment in a file: find a number by guessing. `examples/number_game.yaml` trains in it."""

import math
import random


class NumberGame:
    """A guess earns what it finds out: log(numbers left before ÷ numbers left after) ÷ log(all numbers). The guesses of a
    game earn at most 1 together, for the number itself. ``by_chance`` is a control, whose rewards say nothing.
    """

    def __init__(self, *, numbers: int = 9, by_chance: bool = False):
        self.numbers, self.by_chance = numbers, by_chance

    def reset(self, data, seed):
        self.wanted = random.Random(seed).randint(1, self.numbers)
        self.low, self.high = 1, self.numbers
        return self.question()

    def step(self, guess):
        before = self.known()
        if guess == self.wanted:
            self.low = self.high = guess
        elif guess > self.wanted:
            self.high = min(self.high, math.ceil(guess) - 1)
        else:
            self.low = max(self.low, math.floor(guess) + 1)
        reward = random.random() / 2 if self.by_chance else self.known() - before
        return f"Not {guess}. {self.question()}", reward, guess == self.wanted, False, {"accuracy": self.known()}

    def known(self):
        """Tells how much is known of the number: 0 at the beginning, 1 when only one is left."""
        return 1 - math.log(self.high - self.low + 1) / math.log(self.numbers)

    def question(self):
        return f"It is from {self.low} to {self.high}. Guess it."
