"""The means by which an episode generates: the engine, with the episode's noise and deadline, and a second model beside it.

In deterministic runs (`Wave`), all requests of one turn reach the engine together. A `Partner` is a second, frozen model in
an inference engine of its own, which a workflow talks to.

An episode has `rollout.episode_timeout_s` seconds, and a nested call ends before its caller. The *play* of an episode is
its tool chat, agent or program. A tool or environment call must end before the play, and the play must end early enough to
leave time for the reward.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from tandem.api.activity import GENERATING, did
from tandem.api.chat_template import render
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, WaitTimeout, WrongWorkflow
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey, RequestTiming, StopReason
from tandem.api.workflow import GeneratesTokens
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig


class WaveEpisode(Protocol):
    """The methods of an episode that a `Wave` calls."""

    @property
    def at_turn(self) -> bool:
        """True if the wave need not wait for this episode: each of its samples waits for its next turn, or has ended."""
        ...

    @property
    def at_rest(self) -> bool:
        """True if each of the episode's samples has ended, or waits for a turn of the engine or of a second model."""
        ...


class Wave:
    """Synchronises the turns of episodes that started together. After its first request, each request of a sample waits
    until every other sample has its next request or has ended. Then the engine is paused while all these requests are
    queued. So the response times of environments, tools and rewards do not decide which requests are computed together. Use
    from the event loop's thread only.

    Requests to a second model (`beside`) form turns of their own, which begin when all samples wait.
    """

    def __init__(self, engine: InferenceEngine, members: Sequence[WaveEpisode], before: "Wave | None" = None):
        """``before``: the wave of the same episodes whose turns come first; None: this is the wave of the policy's
        engine."""
        self._engine, self._members, self._before = engine, members, before
        self._beside: dict[InferenceEngine, Wave] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._leaving: set[asyncio.Future[None]] = set()
        self._left = asyncio.Event()
        self._release: asyncio.Task[None] | None = None

    async def turn(self) -> None:
        """Waits for the next turn. After this returns, the caller must issue its request before it awaits anything else."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._waiting.add(place)
        self.look()
        try:
            await place
        finally:
            self._waiting.discard(place)
            loop.call_soon(self._has_left, place)  # after this step of the loop, when the engine has the request

    def look(self) -> None:
        """Begins the next turn if all samples wait. Must be called whenever a sample begins to wait, or ends."""
        if self._release is None and self._waiting and self._nobody_else:
            self._release = asyncio.get_running_loop().create_task(self._begin_turn())
        for wave in self._beside.values():
            wave.look()

    def beside(self, engine: InferenceEngine) -> "Wave":
        """Returns the wave of a second model that the same episodes use; creates it at the first call."""
        if engine not in self._beside:
            self._beside[engine] = Wave(engine, self._members, before=self)
        return self._beside[engine]

    @property
    def _nobody_else(self) -> bool:
        """True if every sample waits and the next turn belongs to this wave."""
        if self._before is None:
            return all(member.at_turn for member in self._members)
        return all(member.at_rest for member in self._members) and not self._before._nobody_else

    async def _begin_turn(self) -> None:
        try:
            await asyncio.to_thread(self._engine.pause)
        # the requests themselves will raise it, or are retried elsewhere
        except (EngineDied, WaitTimeout, InfrastructureFailure):
            self._let_go()
            self._release = None
            return
        try:
            self._let_go()
            if self._leaving:
                await self._left.wait()
        finally:
            with contextlib.suppress(InfrastructureFailure):
                await asyncio.to_thread(self._engine.resume)
            self._release = None
        self.look()

    def _let_go(self) -> None:
        self._leaving, self._waiting = self._waiting, set()
        self._left.clear()
        for place in self._leaving:
            if not place.done():
                place.set_result(None)

    def _has_left(self, place: "asyncio.Future[None]") -> None:
        self._leaving.discard(place)
        if not self._leaving:
            self._left.set()


BESIDE = 1 << 20
"""In noise keys, the first trajectory number of requests to a second model. It exceeds the number of trajectories of any
episode."""


async def generated(engine: GeneratesTokens, request: LLMRequest) -> LLMResponse:
    """Returns the engine's response to a request.

    Raises:
        DataFailure: ``cancelled``, the engine has cancelled the request.
    """
    response = await engine.agenerate(request)
    if response.stop_reason == StopReason.CANCELLED:
        raise DataFailure("cancelled", "the request was cancelled, so the reply is not what the policy would have said")
    return response


class EpisodeEngine:
    """Passes requests to the engine and fills in the fields that they leave out.

    ``noise_key`` names the episode. This class counts its ``trajectory``: a request that continues the tokens of the
    previous request belongs to the same trajectory, any other request begins a new trajectory. So no noise is used twice.
    ``deadline_s`` counts from construction. ``on_issue`` is called on the event loop once the first request of each sample
    is issued. ``needs_logprobs``: see `LLMRequest`; False in a request takes precedence. ``wave``: the wave, in a
    deterministic run. ``as_one``: the workflow makes the whole group and does not `end` its samples, so the wave treats them
    as one.
    """

    def __init__(
        self,
        engine: GeneratesTokens,
        noise_key: NoiseKey,
        *,
        deadline_s: float | None = None,
        affinity: str | None = None,
        on_issue: Callable[[], None] | None = None,
        needs_logprobs: bool = True,
        wave: Wave | None = None,
        as_one: bool = False,
    ):
        self._engine, self.noise_key, self._needs_logprobs = engine, noise_key, needs_logprobs
        self._expires = None if deadline_s is None else time.monotonic() + deadline_s
        self._affinity = affinity or f"{noise_key.epoch}/{noise_key.group}"
        self._on_issue = on_issue
        self._samples: list[EpisodeEngine] = []
        self._last: tuple[int, ...] | None = None
        self._trajectory = -1
        self._wave, self._as_one, self._whole = wave, as_one, as_one
        self._waiting = self._generating = self._asking = self._asked = 0
        self.issued = self._ended = False
        self._read: list[tuple[tuple[int, ...], Sequence[str]]] = []

    def for_sample(self, sample: int) -> "EpisodeEngine":
        """Returns the engine of one sample of the group, with its own noise and the same affinity and deadline."""
        sample_engine = EpisodeEngine(
            self._engine,
            self.noise_key._replace(sample=sample),
            affinity=self._affinity,
            on_issue=self._on_issue,
            needs_logprobs=self._needs_logprobs,
            wave=self._wave,
        )
        sample_engine._expires = self._expires
        if self._whole:
            sample_engine._read, sample_engine._whole = self._read, True
        self._samples.append(sample_engine)
        return sample_engine

    @property
    def settled(self) -> bool:
        """True if each sample has issued its first request, or has ended without a request."""
        return all(sample.settled for sample in self._samples) if self._samples else self.issued

    @property
    def at_turn(self) -> bool:
        """True if each sample waits for its next turn, or has ended; see `Wave`."""
        parts = [self, *self._samples] if self._as_one else self._samples or [self]
        if self._as_one:
            return any(part._waiting for part in parts) and not any(part._generating for part in parts)
        return all(part._ended or (part._waiting and not part._generating) for part in parts)

    @property
    def at_rest(self) -> bool:
        """True if each sample waits for a turn of the engine or of a second model, or has ended; see `Wave`."""
        parts = [self, *self._samples] if self._as_one else self._samples or [self]
        waits = [part._waiting + part._asking > 0 for part in parts]
        if any(part._generating for part in parts):
            return False
        return any(waits) if self._as_one else all(part._ended or waits[i] for i, part in enumerate(parts))

    def end(self) -> None:
        """Marks this sample as ended: it will issue no more requests."""
        self._settle()
        self._ended = True
        if self._wave is not None:
            self._wave.look()

    def has_read(self, context: tuple[int, ...], missing: Sequence[str]) -> None:
        """Implements `tandem.api.workflow.EpisodeView.has_read`."""
        self._read.append((context, missing))

    def _check_reward_complete(self, request: LLMRequest) -> None:
        """Checks that the episode does not continue after it has read a reward that lacks terms. A workflow that makes the
        whole group may judge its samples one after another; of such a workflow only a request that continues judged tokens
        is refused.

        Raises:
            WrongWorkflow: the request continues after such a reward.
        """
        for context, missing in self._read:
            if not self._whole or (context and request.input_ids[: len(context)] == context):
                raise WrongWorkflow(
                    f"the workflow asked for the reward and generated again, and {', '.join(missing)} of the reward is "
                    "added only when the episode has ended, so it acted on an incomplete reward. Use terms that are "
                    "computed at once (models behind a server: judge(url=…), remote(url=…)), ask for the reward last, or "
                    'set in the workflow reads_reward = "partly" if the other terms are enough to act on'
                )

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates a response, see `InferenceEngine.agenerate`.

        Raises:
            DataFailure: ``deadline``, the episode's time is over.
            WrongWorkflow: the episode continues after it has read an incomplete reward.
        """
        self._check_reward_complete(request)
        if self._wave is not None and self.issued:
            await self._turn(self._wave)
        request, own_deadline = self._complete(request)
        self._settle()
        began = time.monotonic()
        self._generating += 1
        try:
            response = await self._engine.agenerate(request)
        finally:
            self._generating -= 1
            if self._wave is not None and self._waiting:  # the sample has another request that waits for the wave
                self._wave.look()
        did(*GENERATING)
        if response.timing is None:  # a server that reports no timing
            response = replace(response, timing=RequestTiming(math.nan, math.nan, time.monotonic() - began))
        if own_deadline and response.stop_reason == StopReason.CANCELLED and self.remaining_s <= 0:
            raise DataFailure("deadline", "the episode's time (rollout.episode_timeout_s) was spent while it was generating")
        self._last = (*request.input_ids, *response.output_ids)
        return response

    async def ask_beside(self, other: InferenceEngine, request: LLMRequest) -> LLMResponse:
        """Requests a response of a second model within the episode's time, with noise of its own. The response is not
        trained on.

        Raises:
            DataFailure: ``deadline``, the episode's time is over.
        """
        self._settle()  # the first request of a sample may be to the second model
        key = self.noise_key._replace(trajectory=BESIDE + self._asked)
        self._asked += 1
        if self._wave is not None:
            self._asking += 1
            try:
                await self._wave.beside(other).turn()
            finally:
                self._asking -= 1
        own_deadline = request.deadline_s is None or request.deadline_s > self.remaining_s
        deadline_s = max(0.0, self.remaining_s) if own_deadline else request.deadline_s
        deadline_s = None if deadline_s == math.inf else deadline_s
        self._generating += 1
        try:
            response = await other.agenerate(
                replace(request, noise_key=key, affinity=self._affinity, deadline_s=deadline_s, needs_logprobs=False)
            )
        finally:
            self._generating -= 1
            if self._wave is not None:
                self._wave.look()
        did(*GENERATING)
        if own_deadline and response.stop_reason == StopReason.CANCELLED and self.remaining_s <= 0:
            raise DataFailure("deadline", "the episode's time (rollout.episode_timeout_s) was spent while a partner wrote")
        return response

    async def _turn(self, wave: Wave) -> None:
        self._waiting += 1
        try:
            await wave.turn()
        finally:
            self._waiting -= 1

    def _complete(self, request: LLMRequest) -> tuple[LLMRequest, bool]:
        """Returns the request with all fields filled in, and True if its deadline is the episode's."""
        changes: dict[str, object] = {}
        if request.noise_key is None:
            if self._last is None or request.input_ids[: len(self._last)] != self._last:
                self._trajectory += 1
            self._last = None  # used up: a concurrent request with the same tokens begins another trajectory
            changes["noise_key"] = self.noise_key._replace(trajectory=self._trajectory)
        if request.affinity is None:
            changes["affinity"] = self._affinity
        if not self._needs_logprobs:
            changes["needs_logprobs"] = False
        own_deadline = request.deadline_s is None and self._expires is not None
        if own_deadline:
            changes["deadline_s"] = max(0.0, self.remaining_s)
        return replace(request, **changes), own_deadline  # type: ignore[arg-type]

    @property
    def remaining_s(self) -> float:
        """Seconds left until the episode's deadline; infinity if it has none."""
        return float("inf") if self._expires is None else self._expires - time.monotonic()

    def _settle(self) -> None:
        if not self.issued:
            self.issued = True
            if self._on_issue is not None:  # after this step of the loop, when the engine has the request
                asyncio.get_running_loop().call_soon(self._on_issue)


PLAY = 0.9
"""Share of an episode's time limit for its tool chat, agent or program (the play); the rest is for its reward."""

PROGRAM = 0.8
"""Share of an episode's time limit for running a program. It is below `PLAY`, because opening and closing the program's
sandbox takes time too."""

TOOL = 0.25
"""Maximum share of the remaining time that one tool call may take."""

RESET, STEP, CLOSE = (1 / 10, 60.0), (1 / 20, 30.0), (1 / 120, 5.0)
"""Time limits of an environment's calls, each a pair: share of the episode's time limit, and maximum in seconds."""


def left_for_play(engine: GeneratesTokens) -> float:
    """Returns the seconds until the episode's tool chat, agent or program must end; infinity if the engine has no
    deadline."""
    return max(0.0, getattr(engine, "remaining_s", float("inf"))) * PLAY


def inside(name: str, seconds: float | None, most_s: float, episode_timeout_s: float) -> float:
    """Returns a time limit in seconds: ``seconds`` if set, else ``most_s``, which is derived from the episode's time limit.
    ``name``: the configuration key of ``seconds``, for the error.

    Raises:
        ConfigError: ``seconds`` is not above 0 and below ``episode_timeout_s``.
    """
    if seconds is None:
        return most_s
    if not 0 < seconds < episode_timeout_s:
        raise ConfigError(
            f"{name} must be above 0 and below rollout.episode_timeout_s ({episode_timeout_s:g}), got {seconds:g}; leave it "
            f"out for {most_s:g}"
        )
    return seconds


def of_environment(call: tuple[float, float], episode_timeout_s: float) -> float:
    """Returns the time limit of one call to an environment, in seconds. ``call``: `RESET`, `STEP` or `CLOSE`."""
    share, most_s = call
    return min(share * episode_timeout_s, most_s)


MAX_NEW_TOKENS = 64
"""Default maximum length of a reply in tokens."""


class Partner(Protocol):
    """The second model, as passed to a workflow with an argument `partner`."""

    async def reply(self, engine: GeneratesTokens, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns a reply to a conversation. ``engine``: the engine of the calling episode, for noise, deadline and
        turns."""
        ...


class ModelPartner:
    """A model folder as a partner: ``partner=model(path=smollm2-135m, max_new_tokens=24)``.

    The partner is never trained, and its tokens are not trained on: the workflow adds its text as another speaker's turn.
    """

    def __init__(
        self, path: str, *, max_new_tokens: int = MAX_NEW_TOKENS, temperature: float = 0.0, patience_s: float = 120.0
    ):
        """``temperature``: 0 selects greedy decoding. ``patience_s``: maximum time of one reply in seconds.

        Raises:
            ConfigError: a knob is out of range.
        """
        if max_new_tokens < 1 or temperature < 0 or patience_s <= 0:
            raise ConfigError("partner: max_new_tokens must be at least 1, temperature at least 0, and patience_s above 0")
        self.path, self.max_new_tokens, self.patience_s = path, max_new_tokens, patience_s
        greedy = temperature == 0
        self._gconfig = GenerationConfig(
            max_new_tokens=max_new_tokens, greedy=greedy, temperature=1.0 if greedy else temperature, n_samples=1
        )
        self._awake: Callable[[], InferenceEngine] | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def start(self, awake: Callable[[], InferenceEngine], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the engine and tokenizer. ``awake``: returns the engine and wakes it if necessary."""
        self._awake, self._tokenizer = awake, tokenizer

    async def reply(self, engine: GeneratesTokens, messages: Sequence[Mapping[str, Any]]) -> str:
        """Implements `Partner.reply`.

        Raises:
            DataFailure: ``partner_refuses``: the partner's chat template rejects the conversation; ``partner_timeout``; or
                the engine's failure for a prompt that is too long.
            InfrastructureFailure: no engine has started, for example outside a run.
        """
        tokenizer = self._tokenizer
        if self._awake is None or tokenizer is None:
            raise InfrastructureFailure("no_engine", "a partner was used before the first episode; use it in an episode")
        try:
            text = render(tokenizer, messages, add_generation_prompt=True)
        except DataFailure as error:
            raise DataFailure("partner_refuses", f"the partner's chat template refuses the conversation: {error}") from error
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        request = LLMRequest(ids, self._gconfig, deadline_s=self.patience_s, needs_logprobs=False)
        beside = getattr(engine, "ask_beside", None)  # only an episode's engine has this method
        model = self._awake()
        response = await (model.agenerate(request) if beside is None else beside(model, request))
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("partner_timeout", f"no reply within patience_s={self.patience_s:g}")
        return str(tokenizer.decode(list(response.output_ids), skip_special_tokens=True)).strip()
