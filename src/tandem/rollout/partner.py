"""Another model that a workflow talks to: frozen, in an engine of the run's own beside the policy's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import render
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, InfrastructureFailure
from tandem.api.requests import LLMRequest, StopReason
from tandem.api.workflow import GeneratesTokens
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig

MAX_NEW_TOKENS = 64
"""Longest reply in tokens, unless the configuration says otherwise."""


class Partner(Protocol):
    """The object that a workflow which asks for `partner` is given."""

    async def reply(self, engine: GeneratesTokens, messages: Sequence[Mapping[str, Any]]) -> str:
        """Its reply to a conversation. ``engine``: that of the episode, which knows its noise, time and turns."""
        ...


class ModelPartner:
    """A model folder as a partner: ``partner=model(path=smollm2-135m, max_new_tokens=24)``.

    It is never trained, and nothing that it writes is: the workflow says it into the chat as somebody else's words.
    """

    def __init__(
        self, path: str, *, max_new_tokens: int = MAX_NEW_TOKENS, temperature: float = 0.0, patience_s: float = 120.0
    ):
        """``temperature``: 0 takes the likeliest token. ``patience_s``: the longest that a reply may take.

        Raises:
            ConfigError: a knob has no sense.
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
        """From now on this engine writes. ``awake``: gives it, awake. ``tokenizer``: the model's own."""
        self._awake, self._tokenizer = awake, tokenizer

    async def reply(self, engine: GeneratesTokens, messages: Sequence[Mapping[str, Any]]) -> str:
        """Implements `Partner.reply`.

        Raises:
            DataFailure: ``partner_refuses`` where its chat template does, ``partner_timeout``, or what an engine says of a
                prompt that is too long.
            InfrastructureFailure: no engine has started, as outside of a run.
        """
        tokenizer = self._tokenizer
        if self._awake is None or tokenizer is None:
            raise InfrastructureFailure("no_engine", "a partner was asked before the first episode; ask in an episode")
        try:
            text = render(tokenizer, messages, add_generation_prompt=True)
        except DataFailure as error:
            raise DataFailure("partner_refuses", f"its chat template refuses the conversation: {error}") from error
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        request = LLMRequest(ids, self._gconfig, deadline_s=self.patience_s, needs_logprobs=False)
        beside = getattr(engine, "ask_beside", None)  # an episode's engine has it
        model = self._awake()
        response = await (model.agenerate(request) if beside is None else beside(model, request))
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("partner_timeout", f"no reply within patience_s={self.patience_s:g}")
        return str(tokenizer.decode(list(response.output_ids), skip_special_tokens=True)).strip()
