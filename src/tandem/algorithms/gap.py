"""The gap between the engine that samples and the trainer that scores: the one definition of it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.api.lazy_torch import torch


def gap(scored: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|scored − rollout| where ``mask`` is true, else 0; all ``[T]``, log-probabilities of the same tokens in nats."""
    return (scored - rollout).abs().masked_fill(~mask, 0.0)


MOST_OF_ONE = 0.5
"""The largest part of the evidence that may come from one sequence."""


@dataclass(frozen=True)
class Evidence:
    """Tokens that show whether the sampler had the last update. All tensors are ``[K]``, log-probabilities in nats.

    Let r, s and o be what the sampler said, the score under the version that it names, and the score under the version
    before. Least squares of r − s on o − s gives the share of the update that the sampler lacks: 0 none of it, 1 all of it.
    Rounding in s stands on both sides of that regression and pulls the share towards ½ from either side, never across it:
    the share is ½ + (|r − s|² − |r − o|²) / 2|s − o|², and where s and o are equally noisy the noise cancels from the
    numerator. So the test is on which side of ½ the share lies, which no amount of noise in the scores can decide wrongly,
    and the share itself means something only where s and o are exact.
    """

    residual: torch.Tensor
    """r − s."""

    step: torch.Tensor
    """o − s."""

    sequence: torch.Tensor
    """The sequence of each token, int64. Noise is independent between sequences, not quite within one."""

    @classmethod
    def of(cls, rollout: torch.Tensor, scored: torch.Tensor, older: torch.Tensor, sequence: torch.Tensor) -> Evidence:
        """Evidence of tokens ``[K]``, scored under the version that the sampler names and under the one before."""
        return cls((rollout - scored).double(), (older - scored).double(), sequence)

    @classmethod
    def pooled(cls, several: list[Evidence]) -> Evidence:
        """The tokens of several verifications as one; their sequences stay apart."""
        sequences, offset = [], 0
        for one in several:
            sequences.append(one.sequence + offset)
            offset += int(one.sequence.max()) + 1 if len(one) else 0
        residuals, steps = [one.residual for one in several], [one.step for one in several]
        return cls(torch.cat(residuals), torch.cat(steps), torch.cat(sequences))

    def __len__(self) -> int:
        return len(self.step)

    @property
    def missing_share(self) -> float:
        """The share of the update that the sampler lacks; ½, which says nothing, if the update changes no token."""
        square = float(self.step.square().sum())
        return float((self.residual * self.step).sum()) / square if square else 0.5

    @property
    def sigmas(self) -> float:
        """The number of standard errors by which the share lies below ½: positive if the update arrived, negative if it is
        missing.

        The standard error is the larger of two, one for independent tokens and one for independent sequences. Both are
        sandwich estimates with each residual divided by 1 − leverage (MacKinnon and White 1985, HC3; by sequence CR3), so
        that a token that the fit follows does not count as certain. 0, which is no evidence, if one sequence has more than
        `MOST_OF_ONE` of the sum of squares: then nothing else says how noisy it is.
        """
        square = self.step.square()
        total = float(square.sum())
        if not total:
            return 0.0
        share = self.missing_share
        scores = self.step * (self.residual - share * self.step)
        leverage = square / total
        of_sequence = self._by_sequence(square) / total
        if float(of_sequence.max()) > MOST_OF_ONE:
            return 0.0
        by_token = float((scores / (1 - leverage)).square().sum())
        by_sequence = float((self._by_sequence(scores) / (1 - of_sequence)).square().sum())
        return (0.5 - share) * total / max(by_token, by_sequence, 1e-20) ** 0.5

    def _by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(int(self.sequence.max()) + 1).index_add(0, self.sequence, values)
