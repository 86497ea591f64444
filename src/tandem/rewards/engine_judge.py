"""Judges within the run: a language model that runs in its own inference engine, next to the policy's.

The judging reward is the same as for a server (`tandem.rewards.judge`); only the client differs.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tandem.api.chat_template import render
from tandem.api.engines import TrainEngine
from tandem.api.failures import EngineDied, RewardFailure
from tandem.api.lazy_torch import TensorDict
from tandem.api.media import MediaTokens, Medium, encode, prompt_key
from tandem.api.requests import LLMRequest, NoiseKey, StopReason
from tandem.api.workflow import FrozenModel, GeneratesTokens, GroupReward, RewardFn, Score
from tandem.config.rollout import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mark = Callable[[Sequence[Mapping[str, Any]]], str]


class SamplePlace(NamedTuple):
    """The position of a sample in a judged batch."""

    group: int = 0
    sample: int = 0


PLACE: contextvars.ContextVar[SamplePlace] = contextvars.ContextVar("PLACE")
"""The sample that the current task judges. Requests are admitted in the order of samples, so that the requests of a group
are adjacent."""


class EngineJudge:
    """A language model in an inference engine. Call `use` with the engine whenever the engine is awake."""

    def __init__(self, name: str, mark: Mark, *, model: str, n: int, temperature: float, max_tokens: int, patience_s: float):
        """``name``: the reward's name. ``n``: number of texts for each prompt. ``patience_s``: time limit in seconds for all
        concurrent requests together."""
        self.name, self.mark, self.model, self.patience_s = name, mark, model, patience_s
        self.votes, self.max_tokens = n, max_tokens
        greedy = temperature == 0
        self._gconfig = GenerationConfig(
            max_new_tokens=max_tokens, greedy=greedy, temperature=1.0 if greedy else temperature, n_samples=1
        )
        self._engine: GeneratesTokens | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.issued = 0
        """Number of requests sent so far."""

    def use(self, engine: GeneratesTokens, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the engine that is used from now on."""
        self._engine, self._tokenizer = engine, tokenizer

    async def texts(self, prompt: str, media: Sequence[Medium] = ()) -> list[str]:
        """Returns the model's texts, one a vote. ``media`` are shown before the prompt.

        Raises:
            RewardFailure: ``judge_timeout``, ``judge_died``, or the engine's failure for the prompt.
        """
        assert self._engine is not None and self._tokenizer is not None, "call `use` first"
        parts = [*({"type": item.kind, "medium": item} for item in media), {"type": "text", "text": prompt}]
        rendered = render(self._tokenizer, [{"role": "user", "content": parts}], add_generation_prompt=True)
        tokens = encode(self._tokenizer, rendered, media)
        return list(await asyncio.gather(*(self._write(tokens, vote) for vote in range(self.votes))))

    async def _write(self, tokens: MediaTokens, vote: int) -> str:
        assert self._engine is not None and self._tokenizer is not None
        shown = prompt_key(tokens.ids, tokens.media)
        place, digest = PLACE.get(SamplePlace()), hashlib.sha256(str(shown).encode()).digest()
        key = NoiseKey(0, 0, place.group, place.sample, int.from_bytes(digest[:4], "big"), vote)
        media = tuple(tokens.media)
        request = LLMRequest(
            tuple(tokens.ids), self._gconfig, key, media=media, deadline_s=self.patience_s, needs_logprobs=False
        )
        self.issued += 1
        try:
            response = await self._engine.agenerate(request)
        except EngineDied as error:
            raise RewardFailure("judge_died", f"{self.name}: {error}") from error
        if response.stop_reason == StopReason.CANCELLED:
            raise RewardFailure("judge_timeout", f"{self.name}: not done within patience_s={self.patience_s:g}")
        return str(self._tokenizer.decode(list(response.output_ids), skip_special_tokens=True))

    def close(self) -> None:
        """Does nothing: the owner closes the engine."""


class WritingReward(Score):
    """A reward whose model generates text. ``reward`` makes the requests, sends them through an `EngineJudge`, and parses
    the answers."""

    def __init__(self, reward: RewardFn | GroupReward, path: str):
        self.reward, self.name, self.model = reward, str(getattr(reward, "name", "")), FrozenModel(path, head="text")

    @property
    def client(self) -> EngineJudge:
        """The client that sends requests to the engine."""
        client = getattr(self.reward, "judge", None)
        assert isinstance(client, EngineJudge), "a judge without a url has an EngineJudge"
        return client

    @property
    def compares(self) -> bool:
        """True if the reward judges the samples of a group together."""
        return isinstance(self.reward, GroupReward)

    @property
    def requests(self) -> int:
        """Maximum number of requests for one sample."""
        return int(getattr(self.reward, "requests", self.client.votes))

    @property
    def shown(self) -> int:
        """Maximum number of replies in one request."""
        return int(getattr(self.reward, "shown", 1))

    def score(self, batch: TensorDict, model: TrainEngine) -> NoReturn:
        """Always raises: this reward is generated, not computed from log-probabilities."""
        raise TypeError(f"reward {self.name!r} is written, not computed")
