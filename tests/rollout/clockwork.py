"""An engine, by the contract, whose answers come when a schedule says: the executor's own logic is tested on it."""

import asyncio

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied
from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.weights import WeightVersion
from tandem.api.workflow import RewardResult, RolloutWorkflow, Sample
from tandem.config.rollout import GenerationConfig
from tandem.rollout.workflows import Tokens


class ClockworkEngine(InferenceEngine):
    """Answers two tokens after ``delay_s(request)`` seconds, stamped with the version at the beginning and at the end.

    Where there is a delay, ``hold(request, version)`` may prolong it.
    """

    def __init__(self, delay_s=lambda request: 0.0, hold=lambda request, number: False):
        self.delay_s, self.hold, self.number, self.requests, self.dead, self.paused = delay_s, hold, 0, [], False, 0

    async def agenerate(self, request):
        if self.dead:
            raise EngineDied("the clockwork has stopped")
        self.requests.append(request)
        began, delay_s = self.number, self.delay_s(request)
        end = asyncio.get_running_loop().time() + delay_s
        while delay_s and (self.paused or self.hold(request, self.number) or asyncio.get_running_loop().time() < end):
            if self.dead:
                raise EngineDied("the clockwork has stopped")
            await asyncio.sleep(min(delay_s, 0.01))
        return LLMResponse(
            request.input_ids, (7, 8), (-0.5, -0.25), (began, self.number), StopReason.STOP, request.gconfig.temperature
        )

    @property
    def version(self):
        return WeightVersion(self.number)

    @property
    def capabilities(self):
        return frozenset({"noise_key"})

    def prepare_weights(self, update):
        raise NotImplementedError("publish by `number`")

    def commit_weights(self, version):
        self.number = version.number
        return {}

    def discard_weights(self):
        pass

    def pause(self):
        self.paused += 1

    def resume(self):
        self.paused -= 1

    def sleep(self, parts):
        pass

    def wake(self, parts):
        pass

    def statistics(self):
        return {"generated_tokens": 2.0 * len(self.requests)}

    def close(self):
        self.dead = True


class OneAnswer(RolloutWorkflow):
    """One request; the reward is the row's ``reward``. A row's ``fail`` (a function of the attempt) may raise."""

    async def arun_episode(self, engine, data):
        if "fail" in data:
            data["fail"](engine.noise_key.attempt)
        tokens = Tokens([1, int(data.get("tandem.index", 0))])
        tokens.add_response(await engine.agenerate(LLMRequest(tuple(tokens.ids), GenerationConfig())))
        return Sample((tokens.trajectory(),), reward=float(data.get("reward", 1.0)))


class Constant:
    """A reward: 1 where the completion holds the row's answer."""

    async def __call__(self, *, completion, row, **_):
        right = float(str(row["answer"]) in completion)
        return RewardResult(right, accuracy=right)


def rows(count, **columns):
    """Rows of epoch 0."""
    return [{"tandem.epoch": 0, "tandem.index": i, **columns} for i in range(count)]


def prompts(batch):
    """The prompts' indices in a batch of one-answer episodes: their second token."""
    return batch["input_ids"][batch["cu_seqlens"][:-1] + 1].tolist()
