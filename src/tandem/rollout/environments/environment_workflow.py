"""`workflow=environment`: a chat in which an environment takes the user's turns.

Each running episode has an environment in a worker process. The process is reused for later episodes, or killed after a
failure.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.environment import InvalidAction, Observation, StepResult
from tandem.api.failures import DataFailure
from tandem.api.media import unwritten
from tandem.api.requests import LLMResponse
from tandem.api.services import PerEpisode
from tandem.api.workflow import GeneratesTokens, RolloutWorkflow, Sample, Trajectory
from tandem.config.data import EPOCH, INDEX
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.episode_engine import CLOSE, RESET, STEP, generated, inside, of_environment
from tandem.rollout.workflows import Chat
from tandem.workers.process import Silent, Worker, Workers

log = logging.getLogger(__name__)

MOST_CALLS = 256
"""Maximum number of concurrent calls if the number of workers is unlimited. Each call waits in its own thread."""


@dataclass(frozen=True)
class EnvironmentLimits:
    """Limits of the workers of one environment class."""

    workers: int | None = None
    """Maximum number of worker processes; None: one for each running episode."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    max_episodes: int = 1000
    """Number of episodes after which a worker is replaced."""

    memory_mib: float = 2048.0
    """A worker that uses more memory (MiB) than this after an episode is replaced; one that uses more than twice as much
    after any call is killed."""


class EnvironmentWorker(Worker):
    """A worker process that runs one environment."""

    episodes = 0
    memory_mib = 0.0
    call: "Future[dict[str, Any]] | None" = None
    """The current call, or the previous one while the worker is idle."""

    def release(self) -> None:
        if self.call is not None:  # the call's thread reads from the socket until it notices that the worker is dead
            with contextlib.suppress(CancelledError):  # `wait` never returns for a call that was cancelled in the queue
                self.call.exception()
        super().release()


class EnvironmentPool(Workers[EnvironmentWorker]):
    """Lends environments to episodes. May be used from any event loop; the constructor starts no process.

    Example::

        async with pool.world() as world:
            observation = await world.reset({"answer": "7"}, seed=0)
            result = await world.step("5")
    """

    failure, closed = DataFailure, "the run ended during a call"
    reasons: ClassVar = {"late": "environment_timeout", "died": "environment_died", "unsent": "environment_raised"}

    def __init__(self, spec: str, knobs: Mapping[str, Any], *, name: str, limits: EnvironmentLimits):
        """``spec``: the class, as ``my_file.py:Name`` or ``package.module:Name``. ``knobs``: its keyword arguments, which
        must be JSON values."""
        self.limits = limits
        # Starts have their own threads, one per core, so that waiting for a worker never delays calls to other workers.
        self._takers = ThreadPoolExecutor(usable_cores(), thread_name_prefix=f"environment {name}, start")
        self._callers = ThreadPoolExecutor(limits.workers or MOST_CALLS, thread_name_prefix=f"environment {name}")
        main = "tandem.rollout.environments.worker"
        make = partial(EnvironmentWorker, name, main, spec, json.dumps(dict(knobs)))
        super().__init__(name, make, self._takers, self._callers)

    @contextlib.asynccontextmanager
    async def world(self) -> AsyncIterator["World"]:
        """Lends an environment for one episode.

        Raises:
            DataFailure: no environment could be created. Its reason is ``environment_raised``, ``environment_died`` or
                ``environment_timeout``.
        """
        if self._closed:
            raise RuntimeError(f"environment {self.name} is closed")
        taking = self._takers.submit(self._take)
        try:
            worker = await asyncio.wrap_future(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._given_back)
            raise
        world = World(self, worker)
        try:
            yield world
        finally:
            self._return(worker, world.is_sound)

    def _part_from(self, idle: Sequence[EnvironmentWorker]) -> None:
        wait([self._callers.submit(self._farewell, worker) for worker in idle])

    # ------------------------------------------------------------------ in threads

    def ask(self, worker: EnvironmentWorker, call: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a call to the environment and returns its answer.

        Raises:
            DataFailure: the environment raised an exception, missed the deadline, ended its process, used too much memory,
                or returned an invalid value.
        """
        try:
            message = self._sound(worker.ask(call, timeout_s, f"in {call['operation']}"))
        except Silent as silent:
            raise self._failure(silent) from silent.__cause__
        worker.memory_mib = float(message.get("memory_mib", 0.0))
        most = 2 * self.limits.memory_mib
        if worker.memory_mib > most:
            words = f"{self.name} has {worker.memory_mib:.0f} MiB, more than twice memory_mib={self.limits.memory_mib:g}"
            raise DataFailure("environment_memory", words)
        return message

    def _has_room(self) -> bool:
        return bool(self._idle) or self.limits.workers is None or len(self._all) < self.limits.workers

    def _given_back(self, taking: "Future[EnvironmentWorker]") -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._return(taking.result(), True)

    def _return(self, worker: EnvironmentWorker, is_sound: bool) -> None:
        """Takes a worker back after an episode. It becomes idle, or is ended if it failed or reached a limit."""
        worker.episodes += 1
        too_large = worker.memory_mib > self.limits.memory_mib
        if too_large:
            log.info("environment %s has %.0f MiB after an episode and is made anew", self.name, worker.memory_mib)
        stays = is_sound and not too_large and worker.episodes < self.limits.max_episodes
        with self._changed:
            if stays and not self._closed:
                self._idle.append(worker)
                self._end(worker)
            if stays or self._closed:
                return
        with contextlib.suppress(RuntimeError):  # the pool was closed meanwhile, and `close` ends the worker
            self._callers.submit(self._dismiss, worker, is_sound)

    def _dismiss(self, worker: EnvironmentWorker, is_sound: bool) -> None:
        if is_sound:
            self._farewell(worker)
        self._retire(worker)

    def _farewell(self, worker: EnvironmentWorker) -> None:
        """Calls the environment's ``close``; a failure is only logged as a warning."""
        try:
            self.ask(worker, {"operation": "close"}, self.limits.close_timeout_s)
        except DataFailure as failure:
            log.warning("an environment did not close: %s", failure)

    def call(self, worker: EnvironmentWorker, call: Mapping[str, Any], timeout_s: float) -> "Future[dict[str, Any]]":
        """Runs `ask` in a thread."""
        worker.call = self._callers.submit(self.ask, worker, call, timeout_s)
        return worker.call


class World:
    """An environment that is lent to one episode."""

    def __init__(self, pool: EnvironmentPool, worker: EnvironmentWorker):
        self._pool, self._worker = pool, worker
        self.is_sound = True
        """False after a failure; then the worker is not reused."""

    async def reset(self, data: Mapping[str, Any], seed: int) -> Observation:
        """Begins the episode; returns the first observation. Raises `DataFailure`."""
        message = await self._do(self._pool.limits.reset_timeout_s, operation="reset", data=dict(data), seed=seed)
        if "invalid" in message:
            self.is_sound = False
            raise DataFailure("environment_raised", f"{self._pool.name}: InvalidAction in reset: {message['invalid']}")
        return unwritten(message["observation"])

    async def step(self, action: Any) -> StepResult | str:
        """Performs an action. Returns the result, or the environment's message about an invalid action. Raises
        `DataFailure`."""
        message = await self._do(self._pool.limits.step_timeout_s, operation="step", action=action)
        if "invalid" in message:
            return str(message["invalid"])
        info = {} if message["accuracy"] is None else {"accuracy": message["accuracy"]}
        return StepResult(
            unwritten(message["observation"]), message["reward"], message["terminated"], message["truncated"], info
        )

    async def _do(self, timeout_s: float, **call: Any) -> dict[str, Any]:
        is_sound, self.is_sound = self.is_sound, False  # stays False if this is cancelled during the call
        message = await asyncio.wrap_future(self._pool.call(self._worker, call, timeout_s))
        self.is_sound = is_sound
        return message


Reading = Literal["text", "last_word", "last_line", "number", "regex", "json"]

WORD = re.compile(r"[^\W_]+(?:['_-][^\W_]+)*")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reader(reading: Reading, pattern: str | None = None) -> Callable[[str], Any]:
    """Returns the function that extracts the action from a reply. It raises `InvalidAction`, with a message for the model,
    if the reply has none.

    Raises:
        ConfigError: unknown ``reading``, or a pattern that is missing, not allowed, or invalid.
    """
    if reading not in get_args(Reading):
        raise ConfigError(f"action must be one of {', '.join(get_args(Reading))}, got {reading!r}")
    if (pattern is not None) != (reading == "regex"):
        raise ConfigError("action=regex and pattern belong together: set both, as in pattern='<move>(.*?)</move>', or none")
    if pattern is None:
        last_word: Callable[[str], Any] = partial(_match, WORD, "has no word in it")
        return {"text": _text, "last_word": last_word, "last_line": _last_line, "number": _number, "json": _json}[reading]
    try:
        return partial(_match, re.compile(pattern, re.DOTALL), "does not have the right form")
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _text(reply: str) -> str:
    if not reply.strip():
        raise InvalidAction("Your reply is empty.")
    return reply.strip()


def _last_line(reply: str) -> str:
    return _text(reply).splitlines()[-1].strip()


def _number(reply: str) -> int | float:
    number = _match(NUMBER, "has no number in it", reply)
    return float(number) if "." in number else int(number)


def _match(pattern: re.Pattern[str], fault: str, reply: str) -> str:
    """Returns the last match of the pattern, or its group. ``fault``: completes "Your reply …" if there is none."""
    last = next(iter(list(pattern.finditer(reply))[::-1]), None)
    if last is None:
        raise InvalidAction(f"Your reply {fault}.")
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
    """Lets the model act in an environment: observations are the user's turns, replies are actions. The last token of each
    turn gets the turn's reward; the sample's reward is the discounted sum.

    All samples of a group begin in the same state of the environment, unless ``same_start`` is False.
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
        """Runs one episode, see `RolloutWorkflow`.

        Raises:
            DataFailure: the environment failed (``environment_…``), or the engine refused or cancelled a request.
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
            else:  # a turn without a trained token: its reward goes to the turn before
                values[-1] += value
        return _with_turns(sample, values)

    def seed_of(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> int:
        """Returns the seed of an episode: the row's ``seed``, else one derived from the run's seed, the epoch and the
        row."""
        key, fixed = getattr(engine, "noise_key", None), data.get("seed")
        if isinstance(fixed, int) and self.same_start:
            return fixed
        parts = [fixed if isinstance(fixed, int) else None, *(() if key is None else key[: 3 if self.same_start else 4])]
        parts += [data.get(EPOCH), data.get(INDEX)] if key is None else []
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4]) >> 1

    def _start(self, data: Mapping[str, Any], observation: Observation) -> Chat:
        """Returns the chat: the row's messages, with the first observation appended to the last user message."""
        *before, last = [dict(message) for message in data["messages"]]
        if last["role"] == "user" and isinstance(last["content"], str) and isinstance(observation, str):
            before.append(last | {"content": "\n\n".join(text for text in (last["content"].strip(), observation) if text)})
        else:
            before += [last, *([{"role": "user", "content": observation}] if observation else [])]
        return Chat(self.tokenizer, before, system_prompt=self.system_prompt, chat_template_kwargs=self.chat_template_kwargs)

    async def _reply(self, engine: GeneratesTokens, chat: Chat, *, may_be_full: bool) -> LLMResponse | None:
        """Requests the model's turn and adds it to the chat. Returns None if the context has no room for it."""
        try:
            response = await generated(engine, chat.request(self.gconfig))
        except DataFailure as failure:
            if may_be_full and failure.reason == "prompt_too_long":
                return None
            raise
        chat.add(response)
        return response

    async def _act(self, world: World, reply: str) -> StepResult | str:
        """Executes the action of a reply. Returns its result, or a string that says why the reply has no action."""
        try:
            action = self.read(reply)
        except InvalidAction as error:
            return str(error)
        return await world.step(action)

    def _malformed(self, words: str) -> StepResult:
        return StepResult(words, self.malformed_reward, self.on_malformed == "end")


def earned_by_turn(rewards: Sequence[float], discount: float) -> list[float]:
    """Returns the reward for each turn's last token: G_t − G_{t+1}, where G_t = r_t + γ·G_{t+1} is the discounted return.
    These rewards sum to G_t from turn t on, and to G_0 in all. Without discount they equal the rewards r_t."""
    earned, later = [], 0.0
    for reward in reversed(rewards):
        total = reward + discount * later
        earned.append(reward - (1 - discount) * later)
        later = total
    return earned[::-1]


def _with_turns(sample: Sample, earned: Sequence[float]) -> Sample:
    """Returns the sample with each value given to the last trained token of its turn; context separates the turns. The first
    value belongs to no turn: the first token of the prompt gets it."""
    remaining = list(earned)
    trajectories: list[Trajectory] = []
    for trajectory in sample.trajectories:
        mask = trajectory.loss_mask
        ends = [] if trajectories else [0]
        ends += (mask & ~torch.cat([mask[1:], mask.new_zeros(1)])).nonzero().flatten().tolist()
        values, remaining = remaining[: len(ends)], remaining[len(ends) :]
        trajectories.append(trajectory.earning(ends, values))
    return replace(sample, trajectories=tuple(trajectories), own_reward=True)
