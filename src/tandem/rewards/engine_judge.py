"""Judges that the run holds itself: a language model writes, in an engine beside the policy's.

A judgement is asked for by the same reward as from a server (`tandem.rewards.judge`); only the client differs.
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
from tandem.api.scoring import FrozenModel, Score
from tandem.api.workflow import GeneratesTokens, GroupReward, RewardFn
from tandem.config.generation import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mark = Callable[[Sequence[Mapping[str, Any]]], str]


class SamplePlace(NamedTuple):
    """A sample among those that are judged together."""

    group: int = 0
    sample: int = 0


PLACE: contextvars.ContextVar[SamplePlace] = contextvars.ContextVar("PLACE")
"""The sample that the task judges: requests are admitted in this order, so that those of a group stand side by side."""


class EngineJudge:
    """A language model in an inference engine; it is lent one with `use` while it is awake."""

    def __init__(self, name: str, mark: Mark, *, model: str, n: int, temperature: float, max_tokens: int, patience_s: float):
        """``name``: of the reward. ``n``: texts for each prompt. ``patience_s``: for all that are asked together."""
        self.name, self.mark, self.model, self.patience_s = name, mark, model, patience_s
        self.votes, self.max_tokens = n, max_tokens
        greedy = temperature == 0
        self._gconfig = GenerationConfig(
            max_new_tokens=max_tokens, greedy=greedy, temperature=1.0 if greedy else temperature, n_samples=1
        )
        self._engine: GeneratesTokens | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.issued = 0
        """Requests so far."""

    def use(self, engine: GeneratesTokens, tokenizer: PreTrainedTokenizerBase) -> None:
        """From now on this engine is asked."""
        self._engine, self._tokenizer = engine, tokenizer

    async def texts(self, prompt: str, media: Sequence[Medium] = ()) -> list[str]:
        """Its words, one text a vote; ``media`` are shown before the prompt.

        Raises:
            RewardFailure: ``judge_timeout``, ``judge_died``, or what the engine says of the prompt.
        """
        assert self._engine is not None and self._tokenizer is not None, "it was lent an engine"
        parts = [*({"type": one.kind, "medium": one} for one in media), {"type": "text", "text": prompt}]
        rendered = render(self._tokenizer, [{"role": "user", "content": parts}], add_generation_prompt=True)
        tokens = encode(self._tokenizer, rendered, media)
        return list(await asyncio.gather(*(self._write(tokens, vote) for vote in range(self.votes))))

    async def _write(self, tokens: MediaTokens, vote: int) -> str:
        assert self._engine is not None and self._tokenizer is not None
        shown = prompt_key(tokens.ids, tokens.media)
        place, digest = PLACE.get(SamplePlace()), hashlib.sha256(str(shown).encode()).digest()
        key = NoiseKey(0, 0, place.group, place.sample, int.from_bytes(digest[:4], "big"), vote)
        asked = {"media": tuple(tokens.media), "deadline_s": self.patience_s, "needs_logprobs": False}
        request = LLMRequest(tuple(tokens.ids), self._gconfig, key, **asked)
        self.issued += 1
        try:
            response = await self._engine.agenerate(request)
        except EngineDied as error:
            raise RewardFailure("judge_died", f"{self.name}: {error}") from error
        if response.stop_reason == StopReason.CANCELLED:
            raise RewardFailure("judge_timeout", f"{self.name}: not done within patience_s={self.patience_s:g}")
        return str(self._tokenizer.decode(list(response.output_ids), skip_special_tokens=True))

    def close(self) -> None:
        """The engine is its owner's to close."""


class WritingReward(Score):
    """A reward whose model writes. ``reward`` asks and reads the answers; its client is the `EngineJudge`."""

    def __init__(self, reward: RewardFn | GroupReward, path: str):
        self.reward, self.name, self.model = reward, str(getattr(reward, "name", "")), FrozenModel(path, head="text")

    @property
    def client(self) -> EngineJudge:
        """The client that asks the engine."""
        client = getattr(self.reward, "judge", None)
        assert isinstance(client, EngineJudge), "without a url it is one"
        return client

    @property
    def compares(self) -> bool:
        """True if it judges the samples of a group together."""
        return isinstance(self.reward, GroupReward)

    @property
    def requests(self) -> int:
        """The most requests for one sample."""
        return int(getattr(self.reward, "requests", self.client.votes))

    @property
    def shown(self) -> int:
        """The most replies in one request."""
        return int(getattr(self.reward, "shown", 1))

    def score(self, batch: TensorDict, model: TrainEngine) -> NoReturn:
        """Nothing is computed from log-probabilities here."""
        raise TypeError(f"reward {self.name!r} is written, not computed")
