"""The objects of the scheduler: sequences, prompts that they share, and pieces of work for prefill."""

from dataclasses import dataclass, field

import torch

from tandem.api.requests import LLMRequest, RequestClock
from tandem.engines.inference.kv_cache import Row
from tandem.engines.inference.stopping import StopText


@dataclass(eq=False)
class SharedPrompt:
    """A prompt whose keys and values several samples read; computed once."""

    tokens: tuple[int, ...]
    row: Row
    members: list["Sequence"] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    """``[hidden]`` of its last token, from which every member draws its first; None until it is computed."""


@dataclass(eq=False)
class Sequence:
    """One completion under way."""

    request_id: int
    request: LLMRequest
    max_new_tokens: int
    deadline: float | None = None
    """On the monotonic clock."""

    stop_text: StopText | None = None
    slot: int = -1
    """Its line in the tables of `Slots`; -1 while it waits."""

    row: Row | None = None
    """Keys and values of the whole sequence, or of the own tokens where the prompt is shared."""

    prompt: SharedPrompt | None = None
    started: bool = False
    """It has its first token and takes part in decode steps."""

    arrival: int = 0
    """Its number among all requests, by the order in which they came."""

    clock: RequestClock = field(default_factory=RequestClock)

    @property
    def tokens_before(self) -> int:
        """Tokens in its row before the first that it draws."""
        return len(self.request.input_ids) if self.prompt is None else 0


@dataclass(eq=False)
class Prefill:
    """Tokens to be run through the model into a row, in one piece or several."""

    tokens: torch.Tensor
    """``[n]`` int64."""

    row: Row
    owner: Sequence | SharedPrompt
    base: SharedPrompt | None = None
    """The prompt that comes before these tokens."""

    done: int = 0
    prompt: tuple[int, ...] = ()
    """The tokens, where they are a whole prompt that others may begin alike."""

    alike: tuple[tuple["Prefill", int], ...] = ()
    """Earlier jobs that begin alike, and how many tokens each has in common; empty once the beginning is copied."""

    gone: bool = False
    """Its row was given back, or may not be copied from."""
