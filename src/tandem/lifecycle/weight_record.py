"""Writes down what each step of a deterministic run made of the weights, for `tandem replay`."""

from collections.abc import Callable, Iterator

import torch

from tandem.api.team import Team
from tandem.state.run_folder import RunFolder
from tandem.state.weight_digests import append_digests, digests_of

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def weight_record(
    team: Team, run: RunFolder | None, weights: Weights, prepare: Callable[[], None] = lambda: None, *, deterministic: bool
) -> Callable[[int], None]:
    """Returns what is called after each step. It adds a line of digests to `weights.jsonl` if the run is ``deterministic``,
    and is collective then.

    ``run``: on rank 0, which writes; the others take part in gathering. ``prepare``: wakes what is read.
    """

    def record(step: int) -> None:
        if not deterministic:
            return
        prepare()
        with team.together(), team.whole(weights()) as stream:
            if run is not None:
                append_digests(run.path, step, digests_of(stream))
            else:
                for _ in stream:
                    pass

    return record
