"""Scores and workflows as a user writes them, those with mistakes among them; the fixture `models` copies this file."""

import asyncio
import contextlib
import time
from dataclasses import replace

import torch

from tandem.api.batch import sum_by_sequence
from tandem.api.failures import DataFailure
from tandem.api.workflow import FrozenModel, Score
from tandem.rollout.workflows import RLVRWorkflow


class StayClose(Score):
    """A teacher as a penalty: how much more probable the policy finds its answer than the teacher does."""

    def __init__(self, path):
        self.model = FrozenModel(path)

    def read(self, sample, row, reader):
        return reader.trajectory(sample)

    def score(self, batch, model):
        gap = batch["rollout_logprobs"] - model.forward(batch).logprobs
        return -sum_by_sequence(batch, gap * batch["loss_mask"])


class Polite(Score):
    """A frozen judge: how probable it finds a yes after the answer."""

    def __init__(self, path):
        self.model = FrozenModel(path)

    def read(self, sample, row, reader):
        return reader.text(f"{sample.completion_text} Polite? a")

    def score(self, batch, model):
        return model.forward(batch).logprobs[batch["cu_seqlens"][1:] - 1]


class Constant(Polite):
    def score(self, batch, model):
        return torch.ones(len(batch["cu_seqlens"]) - 1)


class NotFinite(Polite):
    def score(self, batch, model):
        values = torch.arange(len(batch["cu_seqlens"]) - 1).float()
        return torch.where(values % 4 == 0, values / 0, values)


class WrongShape(Polite):
    def score(self, batch, model):
        return torch.ones(1, 2)


class Forgotten(Polite):
    def score(self, batch, model):
        with contextlib.suppress(Exception):
            time.sleep(3600)


class SometimesHangs(Polite):
    name, calls = "helpful", 0

    def read(self, sample, row, reader):
        self.calls += 1
        if self.calls % 20 == 3:
            time.sleep(3600)  # cannot be interrupted
        while self.calls % 20 == 4:
            pass
        return reader.text("yes")


class AlwaysHangs(SometimesHangs):
    calls = 3

    def read(self, sample, row, reader):
        self.calls = 2
        super().read(sample, row, reader)


class Unreadable(Polite):
    def read(self, sample, row, reader):
        raise DataFailure("nothing_to_judge")


class NoModel(Polite):
    def __init__(self, path):
        pass


class NoPath(Polite):
    def __init__(self, path):
        self.model = FrozenModel(None)


class Garbled(Polite):
    def read(self, sample, row, reader):
        return {"input_ids": [1, 2]}


class Even(Polite):
    name = "even"


class Spoils(RLVRWorkflow):
    reads_scores = True

    async def finish_group(self, samples, data):
        return tuple(replace(sample, reward=float("nan")) for sample in samples)


class Hangs(RLVRWorkflow):
    reads_scores = True

    async def finish_group(self, samples, data):
        await asyncio.sleep(3600)


class AsksAgain(RLVRWorkflow):
    """Writes a second answer when the reward of the first one is there."""

    async def arun_episode(self, engine, data):
        for _ in range(2):
            chat = self.start(data)
            await self.reply(engine, chat)
            result = await self.judge(chat, data)
        return chat.sample(result.value, **result.details())


class NeedsAll(AsksAgain):
    reads_reward = "midway"


class Asks(RLVRWorkflow):
    """Asks the model `helpful` by name after a first answer, and then answers again."""

    def __init__(self, helpful, **rest):
        super().__init__(**rest)
        self.helpful = helpful

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        await self.reply(engine, chat)
        first = await self.judge(chat, data, self.helpful)
        chat.say("Again.")
        await self.reply(engine, chat)
        result = await self.judge(chat, data)
        return chat.sample(result.value, rewards=result.rewards, metrics={"first": first.value})


class TakesPart(AsksAgain):
    reads_reward = "partly"


class Misspelt(AsksAgain):
    reads_reward = "partially"


class Ranks(RLVRWorkflow):
    """The reward of a sample is its place in its group by what the judge said."""

    reads_scores = True

    async def finish_group(self, samples, data):
        order = sorted(range(len(samples)), key=lambda i: samples[i].rewards["Polite"])
        return tuple(replace(sample, reward=float(order.index(i))) for i, sample in enumerate(samples))
