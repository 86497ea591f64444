"""What the scheduler moves about: sequences, prompts that they share, and pieces of work for prefill."""

from dataclasses import dataclass, field

import torch

from tandem.api.requests import LLMRequest
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


@dataclass(eq=False)
class Job:
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

    like: "Job | None" = None
    """The job whose row has the first ``common`` tokens, once it has come so far; None once they are copied."""

    common: int = 0
    gone: bool = False
    """Its row was given back, or may not be copied from."""

    @property
    def waits(self) -> bool:
        """Whether the beginning is about to be computed by another job."""
        return self.like is not None and not self.like.gone and self.like.done < self.common

    def copy_beginning(self) -> None:
        """Takes over the keys and values that another row has, if it is still there."""
        like, self.like = self.like, None
        if like is None or like.gone or self.done:
            return
        for mine, other in ((self.row.slab.keys, like.row.slab.keys), (self.row.slab.values, like.row.slab.values)):
            for layer, tensor in enumerate(mine):
                tensor[self.row.index, :, : self.common] = other[layer][like.row.index, :, : self.common]
        self.done = self.common
