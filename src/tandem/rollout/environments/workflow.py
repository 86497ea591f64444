"""`workflow=environment`: a chat whose other speaker is an environment."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.environment import InvalidAction, Observation, StepResult
from tandem.api.failures import DataFailure
from tandem.api.requests import LLMResponse, StopReason
from tandem.api.samples import Sample, Trajectory
from tandem.api.services import PerEpisode
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow
from tandem.config.data import EPOCH, INDEX
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.rollout.chat import Chat
from tandem.rollout.deadlines import CLOSE, RESET, STEP, inside, of_environment
from tandem.rollout.environments.pool import EnvironmentLimits, EnvironmentPool, World

Reading = Literal["text", "last_word", "last_line", "number", "regex", "json"]

WORD = re.compile(r"[^\W_]+(?:['_-][^\W_]+)*")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reader(reading: Reading, pattern: str | None = None) -> Callable[[str], Any]:
    """The function that reads an action; it raises `InvalidAction`, with words for the model, where there is none.

    Raises:
        ConfigError: no such reading, or a pattern that is missing, too many, or wrong.
    """
    if reading not in get_args(Reading):
        raise ConfigError(f"action must be one of {', '.join(get_args(Reading))}, got {reading!r}")
    if (pattern is not None) != (reading == "regex"):
        raise ConfigError("action=regex and pattern belong together: set both, as in pattern='<move>(.*?)</move>', or none")
    if pattern is None:
        return {"text": _text, "last_word": _last_word, "last_line": _last_line, "number": _number, "json": _json}[reading]
    try:
        return partial(_match, re.compile(pattern, re.DOTALL))
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from error


def _text(reply: str) -> str:
    if not reply.strip():
        raise InvalidAction("Your reply is empty.")
    return reply.strip()


def _last_word(reply: str) -> str:
    words = WORD.findall(reply)
    if not words:
        raise InvalidAction("Your reply has no word in it.")
    return str(words[-1])


def _last_line(reply: str) -> str:
    return _text(reply).splitlines()[-1].strip()


def _number(reply: str) -> int | float:
    numbers = NUMBER.findall(reply)
    if not numbers:
        raise InvalidAction("Your reply has no number in it.")
    return float(numbers[-1]) if "." in numbers[-1] else int(numbers[-1])


def _match(pattern: re.Pattern[str], reply: str) -> str:
    last = next(iter(list(pattern.finditer(reply))[::-1]), None)
    if last is None:
        raise InvalidAction("Your reply does not have the right form.")
    return (last[1] if pattern.groups else last[0]) or ""


def _json(reply: str) -> dict[str, Any]:
    decoder, place, last = json.JSONDecoder(), reply.find("{"), None
    while place >= 0:
        try:
            last, end = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = reply.find("{", end)
    if not isinstance(last, dict):
        raise InvalidAction("Your reply has no JSON object in it.")
    return last


class EnvironmentWorkflow(RolloutWorkflow):
    """Observations are the user's turns, the model's replies are actions. What each turn earned is the reward of its last
    token, and the sample's reward is the sum, later turns discounted.

    Group members begin in the same state; ``same_start=False`` gives each its own.
    """

    def __init__(
        self,
        environment: PerEpisode,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        episode_timeout_s: float = 600.0,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_turns: int = 10,
        action: Reading = "text",
        pattern: str | None = None,
        on_malformed: Literal["tell", "end"] = "tell",
        malformed_reward: float = 0.0,
        turn_discount: float = 1.0,
        same_start: bool = True,
        workers: int | None = None,
        reset_timeout_s: float | None = None,
        step_timeout_s: float | None = None,
        close_timeout_s: float | None = None,
        max_episodes: int = 1000,
        memory_mib: float = 2048.0,
    ):
        positive = {
            "max_turns": max_turns,
            "max_episodes": max_episodes,
            "memory_mib": memory_mib,
            "workers": 1 if workers is None else workers,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"workflow=environment: {name} must be more than 0, got {value}")
        if not 0 <= turn_discount <= 1:
            raise ConfigError(f"workflow=environment: turn_discount must lie in 0…1, got {turn_discount}")
        calls = {"reset": (reset_timeout_s, RESET), "step": (step_timeout_s, STEP), "close": (close_timeout_s, CLOSE)}
        reset_s, step_s, close_s = (
            inside(f"workflow_args.{name}_timeout_s", seconds, of_environment(call, episode_timeout_s), episode_timeout_s)
            for name, (seconds, call) in calls.items()
        )
        limits = EnvironmentLimits(workers, reset_s, step_s, close_s, max_episodes, memory_mib)
        self.pool = environment.shared(
            lambda spec, knobs: EnvironmentPool(spec, knobs, name=environment.name, limits=limits)
        )
        self.at_once = workers
        self.gconfig, self.tokenizer, self.system_prompt = gconfig, tokenizer, system_prompt
        self.chat_template_kwargs, self.max_turns = chat_template_kwargs, max_turns
        self.read, self.on_malformed, self.malformed_reward = reader(action, pattern), on_malformed, malformed_reward
        self.turn_discount, self.same_start = turn_discount, same_start

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        """Plays an episode, as `RolloutWorkflow` says.

        Raises:
            DataFailure: the environment failed, under ``environment_…``; or the engine refused or cancelled a request.
        """
        rewards: list[float] = []
        is_trained: list[bool] = []
        malformed, is_cut, result, accuracy = 0, True, StepResult("", 0.0, False), None
        async with self.pool.world() as world:
            chat = self._start(data, await world.reset(data, self.seed_of(engine, data)))
            for turn in range(self.max_turns):
                if turn:
                    chat.say(result.observation)
                response = await self._reply(engine, chat, may_be_full=turn > 0)
                if response is None:
                    break
                answer = await self._act(world, chat.completion)
                malformed += isinstance(answer, str)
                result = self._malformed(answer) if isinstance(answer, str) else answer
                accuracy = result.info.get("accuracy", accuracy)
                rewards.append(result.reward)
                is_trained.append(response.untrained_tokens < len(response.output_ids))
                if result.terminated or result.truncated:
                    is_cut = False
                    break
        earned = earned_by_turn(rewards, self.turn_discount)
        metrics = {
            "turns": float(len(rewards)),
            "malformed_actions": malformed / len(rewards),
            "cut_episodes": float(is_cut),
        }
        sample = chat.sample(sum(earned), accuracy=accuracy, metrics=metrics)
        values = [0.0]
        for value, trained in zip(earned, is_trained, strict=True):
            if trained:
                values.append(value)
            else:  # a turn without a trained token: the turns before it earn its reward, those behind it never do
                values[-1] += value
        return _with_turns(sample, values)

    def seed_of(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> int:
        """The seed of an episode: the row's ``seed``, else one that follows from the run's seed, the epoch and the row."""
        key, own = getattr(engine, "noise_key", None), data.get("seed")
        if isinstance(own, int) and self.same_start:
            return own
        parts = [own if isinstance(own, int) else None, *(() if key is None else key[: 3 if self.same_start else 4])]
        parts += [data.get(EPOCH), data.get(INDEX)] if key is None else []
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4]) >> 1

    def _start(self, data: Mapping[str, Any], observation: Observation) -> Chat:
        """The chat: the row's messages, and the first observation at the end of what the user says."""
        *before, last = [dict(message) for message in data["messages"]]
        if last["role"] == "user" and isinstance(last["content"], str) and isinstance(observation, str):
            before.append(last | {"content": "\n\n".join(text for text in (last["content"].strip(), observation) if text)})
        else:
            before += [last, *([{"role": "user", "content": observation}] if observation else [])]
        return Chat(self.tokenizer, before, system_prompt=self.system_prompt, chat_template_kwargs=self.chat_template_kwargs)

    async def _reply(self, engine: GeneratesTokens, chat: Chat, *, may_be_full: bool) -> LLMResponse | None:
        """Lets the model speak; None if the context has no room for it."""
        try:
            response = await engine.agenerate(chat.request(self.gconfig))
        except DataFailure as failure:
            if may_be_full and failure.reason == "prompt_too_long":
                return None
            raise
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("cancelled", "the request was cancelled, so the reply is not what the policy would have said")
        chat.add(response)
        return response

    async def _act(self, world: World, reply: str) -> StepResult | str:
        """Returns what came of an action; a text says why it is no action."""
        try:
            action = self.read(reply)
        except InvalidAction as error:
            return str(error)
        return await world.step(action)

    def _malformed(self, words: str) -> StepResult:
        return StepResult(words, self.malformed_reward, self.on_malformed == "end")


def earned_by_turn(rewards: Sequence[float], discount: float) -> list[float]:
    """The reward that each turn's last token is given, so that the sum from a turn on is its discounted return
    G_t = r_t + γ·G_{t+1}: G_t − G_{t+1}. Their sum is G_0; without discount they are the rewards themselves."""
    earned, later = [], 0.0
    for reward in reversed(rewards):
        now = reward + discount * later
        earned.append(reward - (1 - discount) * later)
        later = now
    return earned[::-1]


def _with_turns(sample: Sample, earned: Sequence[float]) -> Sample:
    """The sample whose turns earn these rewards, each with its last trained token, and nothing else. Context stands between
    two turns. The first value is earned before any of them, with the first token of the prompt: it is nobody's merit."""
    left = list(earned)
    trajectories: list[Trajectory] = []
    for trajectory in sample.trajectories:
        mask = trajectory.loss_mask
        ends = [] if trajectories else [0]
        ends += (mask & ~torch.cat([mask[1:], mask.new_zeros(1)])).nonzero().flatten().tolist()
        values, left = left[: len(ends)], left[len(ends) :]
        trajectories.append(trajectory.earning(ends, values))
    return replace(sample, trajectories=tuple(trajectories), own_reward=True)
