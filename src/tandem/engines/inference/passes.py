"""Passes of the model: over pieces of prompts packed end to end, and over the newest token of every sequence."""

from collections.abc import Sequence as SequenceOf
from functools import partial

import torch

from tandem.engines.inference import paged_kernel
from tandem.engines.inference.attention import DecodePlan, Kernel, PrefillPlan, PrefillSpan
from tandem.engines.inference.decoder import Decoder
from tandem.engines.inference.fused_weights import FusedWeights
from tandem.engines.inference.kernels import kernels
from tandem.engines.inference.paged import PackedPrefill, PagedDecode
from tandem.engines.inference.row_attention import RowAttention, attends
from tandem.engines.inference.sequences import Prefill, Sequence
from tandem.engines.inference.tower import Shown
from tandem.models.architecture import Architecture
from tandem.models.upload import upload


class Passes:
    """Knows rows of the cache and tokens, and nothing of requests; the weights come with each call."""

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        compute: torch.dtype,
        device: torch.device,
        max_len: int,
    ):
        self._device = device
        self.kernel = Kernel.of(architecture, compute, device)
        compiled = kernels(compute) if device.type == "cpu" else None
        self._compiled = compiled if attends(self.kernel) else None  # attention, too
        self.decoder = Decoder(architecture, dtype, compute, device, max_len, compiled)
        self._plan: DecodePlan | PagedDecode | RowAttention | None = None

    def prefill(
        self, weights: FusedWeights, jobs: SequenceOf[Prefill], pieces: SequenceOf[PrefillSpan], shown: Shown | None = None
    ) -> list[Prefill]:
        """Computes one piece of each job, and returns the jobs that are done now. Owners get the hidden state of their last
        token; jobs with ``scored`` are scored. ``shown``: features of media among the tokens of all pieces."""
        if not jobs:
            return []
        tokens = torch.cat([job.tokens[p.start : p.start + p.count] for job, p in zip(jobs, pieces, strict=True)])
        at = [job.at(p.start, p.count) for job, p in zip(jobs, pieces, strict=True)]
        if any(one.dim() == 2 for one in at):
            at = [one if one.dim() == 2 else one[:, None].expand(-1, 3) for one in at]
        positions = torch.cat(at)
        wanted: list[Prefill] = []
        keep: list[int] = []
        sizes, end = [], 0
        for job, piece in zip(jobs, pieces, strict=True):
            job.done += piece.count
            end += piece.count
            count = int(job.done == len(job.tokens)) if job.scored is None else piece.count
            if count:
                wanted.append(job)
                keep += range(end - count, end)
                sizes.append(count)
        plan: PackedPrefill | PrefillPlan | RowAttention
        if self._compiled is not None:
            plan = RowAttention.of_pieces(self._compiled, self.kernel, pieces)
        elif PackedPrefill.takes(self.kernel):
            plan = PackedPrefill(self.kernel, pieces)
        else:
            plan = PrefillPlan(self.kernel, pieces, self.decoder.windows)
        tokens, positions = upload(tokens, self._device), upload(positions, self._device)
        kept = upload(torch.tensor(keep, dtype=torch.long), self._device)
        hidden = self.decoder.hidden(weights, tokens, positions, plan, kept, shown)
        for job, own in zip(wanted, hidden.split(sizes), strict=True):
            if job.scored is not None:
                job.scored.score(own, job.done, partial(self.decoder.logits, weights))
            if job.done == len(job.tokens):
                job.owner.hidden = own[-1]
        return [job for job in wanted if job.done == len(job.tokens)]

    def logits(self, weights: FusedWeights, hidden: SequenceOf[torch.Tensor]) -> torch.Tensor:
        """A row for each hidden state ``[hidden]``, ``[len(hidden), V]``; the same tensor given twice is computed once."""
        places: dict[int, int] = {}
        unique: list[torch.Tensor] = []
        for one in hidden:
            if id(one) not in places:
                places[id(one)] = len(unique)
                unique.append(one)
        logits = self.decoder.logits(weights, torch.stack(unique))  # [prompts, V]
        if len(unique) == len(hidden):
            return logits
        return logits[upload(torch.tensor([places[id(one)] for one in hidden]), self._device)]

    def plan(self, batch: SequenceOf[Sequence], lengths: SequenceOf[int]) -> None:
        """Plans attention for the sequences that `decode` takes from now on, until one joins or leaves.

        ``lengths``: tokens of each, the newest included.
        """
        starts = [sequence.prompt.length if sequence.prompt is not None else 0 for sequence in batch]
        own = [length - start for length, start in zip(lengths, starts, strict=True)]
        rows = [sequence.row for sequence in batch if sequence.row is not None]
        prompts = [sequence.prompt.row if sequence.prompt is not None else None for sequence in batch]
        if self._compiled is not None:
            self._plan = RowAttention(self._compiled, self.kernel, rows, own, prompts, starts)
        elif self._device.type == "cuda" and paged_kernel.takes(self.kernel.head_dim):
            self._plan = PagedDecode(self.kernel, rows, prompts, own, starts)
        else:
            self._plan = DecodePlan(self.kernel, rows, prompts, own, starts, self.decoder.windows)

    @property
    def planned(self) -> bool:
        return self._plan is not None

    def advance(self) -> None:
        """The planned sequences have one more token each."""
        assert self._plan is not None
        self._plan.advance()

    def decode(self, weights: FusedWeights, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` behind the newest token ``[B]`` of the planned sequences, whose rotary positions are
        ``positions [B]``; both on the host."""
        assert self._plan is not None
        tokens, positions = upload(tokens, self._device), upload(positions, self._device)
        return self.decoder.logits(weights, self.decoder.hidden(weights, tokens, positions, self._plan))

    def forget(self) -> None:
        """Lets go of the plan, and of the cache that it points to."""
        self._plan = None
