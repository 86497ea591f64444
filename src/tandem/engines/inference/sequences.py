"""What the scheduler moves about: sequences, prompts that they share, and pieces of work for prefill."""

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

    clock: RequestClock = field(default_factory=RequestClock)


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

    alike: tuple[tuple["Job", int], ...] = ()
    """Earlier jobs that begin alike, and how many tokens each has in common; empty once the beginning is copied."""

    gone: bool = False
    """Its row was given back, or may not be copied from."""

    def beginning(self) -> tuple["Job | None", int, int]:
        """The job with most to copy now, how many tokens that are, and how many there will be once others have gone on."""
        there = [(job, min(common, job.done), common) for job, common in self.alike if not job.gone]
        best = max(there, key=lambda found: found[1], default=(None, 0, 0))
        return best[0], best[1], max((common for _, _, common in there), default=0)

    def copy_beginning(self, other: "Job", count: int) -> None:
        """Takes over the keys and values of the first ``count`` tokens, which the other's row has."""
        for mine, theirs in ((self.row.slab.keys, other.row.slab.keys), (self.row.slab.values, other.row.slab.values)):
            for layer, tensor in enumerate(mine):
                tensor[self.row.index, :, :count] = theirs[layer][other.row.index, :, :count]
        self.done = count
