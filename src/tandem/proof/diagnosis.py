"""Why trajectories do not score as they say: an update is missing, or another version made them than they are stamped with.

Every kept version is tried. Nothing here is trained; weights come back to the bit.
"""

import torch

from tandem.algorithms.gap import gap
from tandem.api.batch import sequence_index
from tandem.proof.scoring import Scorer, Verified

WHOLE = 0.75
"""From this share on an update is missing as a whole."""


def missing_update(sigmas: float, share: float | None) -> str:
    """The cause where only the direction of the gap shows it. ``sigmas``: standard errors by which it does. ``share``: the
    part of the update that is missing; None if rounding hides how large it is."""
    much = "all or most" if share is None else "all" if share > WHOLE else "a part"
    regression = "" if share is None else f"{share:.0%} by regression, "
    return (
        f"{much} of the last update before their version is missing ({regression}{sigmas:.0f} standard errors), which is "
        "too small to see token by token: they are stamped one version too new, or the server did not apply it. Restart the "
        "server, and look in its log for the update"
    )


def likely_cause(found: Verified, version: int, tolerance: float, scorer: Scorer) -> str:
    """The cause of a gap above the tolerance, and what to do. ``version``: of the weights that train now. Collective."""
    wrong, count = _affected(found, tolerance)
    where, known = "", found.known
    if 0 < len(wrong) < count:
        where = f"only {len(wrong)} of {count} prompts are affected, as when one of several servers is wrong: "
        known = known & torch.isin(found.batch["group_id"], torch.tensor(wrong))[sequence_index(found.batch)]
    return where + (
        _wrong_version(found, known, version, tolerance, scorer)
        or "unknown, for no version that is kept fits. Restart the server, see that it flushes its prefix cache with each "
        "update, and compare its model folder, tokenizer and temperature with the trainer's"
    )


def _off(found: Verified, scored: torch.Tensor, known: torch.Tensor) -> float:
    """Mean gap to these scores over the known tokens, both ``[T]``."""
    rollout = found.batch["rollout_logprobs"]
    return float(gap(scored.nan_to_num(0.0), rollout, known).sum()) / max(1, int(known.sum()))


def _affected(found: Verified, tolerance: float) -> tuple[list[int], int]:
    """Groups that are off, and how many have known tokens."""
    groups = found.batch["group_id"][sequence_index(found.batch)]
    named = groups[found.known].unique().tolist()
    return [g for g in named if _off(found, found.stamped, found.known & (groups == g)) > tolerance], len(named)


def _wrong_version(found: Verified, known: torch.Tensor, version: int, tolerance: float, scorer: Scorer) -> str:
    """All tokens by one version, whatever they say; or each by the version before the one that it says; empty if neither."""
    stamps = found.batch["versions"][known]
    newest, oldest = int(stamps.max()), int(stamps.min())
    tried = {number: number for number in scorer.kept()} | {version: None}
    if newest == oldest:
        tried.pop(newest, None)
    offs = {number: _off(found, scorer.score(found.batch, name), known) for number, name in tried.items()}
    limit = min(tolerance, _off(found, found.stamped, known) / 2)
    one = min(offs, key=lambda number: offs[number], default=None)
    one = one if one is not None and offs[one] <= limit else None
    behind = not bool(found.older[known].isnan().any()) and _off(found, found.older, known) <= limit
    if one is not None and one > oldest:
        return (
            f"they are from version {one}, newer than they say: the server switched before it stamped. It must stamp each "
            "token with the weights that made it"
        )
    if one is not None and (not behind or newest - one > 1 or one == 0):
        late = " (or they are stamped one version too new)" if behind and newest == 1 else ""
        return (
            f"all of them are from version {one}: no update after it was ever applied, though the server said so{late}. "
            "Restart the server, and look in its log for the update"
        )
    if behind:
        said = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        return (
            f"they are stamped one version too new: those that say {said} are from the version before, or the last update "
            "came after its stamp. The stamp must come from the server that computes, not from the client"
        )
    return ""
