"""Writes down what each step of a deterministic run made of the weights, so that two runs can be compared."""

from collections.abc import Callable, Iterator

import torch

from tandem.api.team import Team
from tandem.state.run_folder import RunFolder
from tandem.state.weight_digests import append_digests, digests_of

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def record_weights(team: Team, run: RunFolder | None, weights: Weights, step: int) -> None:
    """Adds a line of digests to `weights.jsonl`. Collective. ``run``: on rank 0, which writes; the others take part in
    gathering.

    Raises:
        NotWritten: the disk refuses.
    """
    with team.together(), team.whole(weights()) as stream:
        if run is not None:
            append_digests(run.path, step, digests_of(stream))
        else:
            for _ in stream:
                pass
