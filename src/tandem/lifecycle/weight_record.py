"""Writes down what each step of a deterministic run made of the weights, so that two runs can be compared."""

from collections.abc import Callable, Mapping

from tandem.api.team import Team
from tandem.state.run_folder import RunFolder
from tandem.state.weight_digests import append_digests


def record_weights(team: Team, run: RunFolder | None, digests: Callable[[], Mapping[str, str]], step: int) -> None:
    """Adds a line of digests to `weights.jsonl`. Collective. ``run``: on rank 0, which writes. ``digests``: of all weights,
    there; collective.

    Raises:
        NotWritten: the disk refuses.
    """
    found = digests()
    with team.together():
        if run is not None:
            append_digests(run.path, step, found)
