"""Passes of the model: over pieces of prompts packed end to end, and over the newest token of every sequence."""

from collections.abc import Sequence as SequenceOf
from functools import partial

import torch

from tandem.engines.inference import paged_kernel
from tandem.engines.inference.attention import DecodePlan, Kernel, PackedPrefill, PagedDecode, PrefillPlan, PrefillSpan
from tandem.engines.inference.decoder import Decoder, FusedWeights
from tandem.engines.inference.kernels import RowAttention, attends, kernels
from tandem.engines.inference.sequences import Prefill, Sequence
from tandem.engines.inference.tower import Shown
from tandem.models.architecture import Architecture
from tandem.models.hardware import upload


class Passes:
    """Runs the model over tokens and cache rows, without knowledge of requests. Weights are an argument of each call."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, compute: torch.dtype, device: torch.device, max_len: int
    ):
        self._device = device
        self.kernel = Kernel.of(architecture, compute, device)
        compiled = kernels(compute) if device.type == "cpu" else None
        self._compiled = compiled if attends(self.kernel) else None  # None: torch computes it
        self.decoder = Decoder(architecture, dtype, compute, device, max_len, compiled)
        self._plan: DecodePlan | PagedDecode | RowAttention | None = None

    def prefill(
        self, weights: FusedWeights, jobs: SequenceOf[Prefill], pieces: SequenceOf[PrefillSpan], shown: Shown | None = None
    ) -> list[Prefill]:
        """Computes one piece of each job and returns the jobs that are now done. Owners get the hidden state of their last
        token; ``scored`` jobs get log-probabilities. ``shown``: features of the media among the tokens of all pieces."""
        if not jobs:
            return []
        pairs = list(zip(jobs, pieces, strict=True))
        tokens = torch.cat([job.tokens[piece.start : piece.start + piece.count] for job, piece in pairs])
        at = [job.at(piece.start, piece.count) for job, piece in pairs]
        if any(piece.dim() == 2 for piece in at):
            at = [piece if piece.dim() == 2 else piece[:, None].expand(-1, 3) for piece in at]
        wanted: list[Prefill] = []
        keep: list[int] = []
        sizes, end = [], 0
        for job, piece in pairs:
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
        tokens, positions = upload(tokens, self._device), upload(torch.cat(at), self._device)
        indices = upload(torch.tensor(keep, dtype=torch.long), self._device)
        hidden = self.decoder.hidden(weights, tokens, positions, plan, indices, shown)
        for job, states in zip(wanted, hidden.split(sizes), strict=True):
            if job.scored is not None:
                job.scored.score(states, job.done, partial(self.decoder.logits, weights))
            if job.done == len(job.tokens):
                job.owner.hidden = states[-1]
        return [job for job in wanted if job.done == len(job.tokens)]

    def logits(self, weights: FusedWeights, hidden: SequenceOf[torch.Tensor]) -> torch.Tensor:
        """Returns logits ``[len(hidden), V]`` of states ``[hidden]``. A tensor that occurs twice is computed once."""
        unique = {id(state): state for state in hidden}
        logits = self.decoder.logits(weights, torch.stack(list(unique.values())))  # [prompts, V]
        if len(unique) == len(hidden):
            return logits
        places = {name: place for place, name in enumerate(unique)}
        return logits[upload(torch.tensor([places[id(state)] for state in hidden]), self._device)]

    def plan(self, batch: SequenceOf[Sequence], lengths: SequenceOf[int]) -> None:
        """Plans attention for the sequences of the following `decode` calls, until one joins or leaves. ``lengths``: number
        of tokens of each sequence, the newest included."""
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

    def advance(self) -> None:
        """Moves the plan on by one token per sequence."""
        assert self._plan is not None
        self._plan.advance()

    def decode(self, weights: FusedWeights, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[B, V]`` after the newest tokens ``[B]`` of the planned sequences, at rotary positions."""
        assert self._plan is not None
        tokens, positions = upload(tokens, self._device), upload(positions, self._device)
        return self.decoder.logits(weights, self.decoder.hidden(weights, tokens, positions, self._plan))

    def forget(self) -> None:
        """Drops the plan, and with it the references to the cache."""
        self._plan = None
