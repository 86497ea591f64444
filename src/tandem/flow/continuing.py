"""A run that goes on with another reward: which of its models stay, and whose weights the new ones share."""

from collections.abc import Iterator
from dataclasses import replace

from tandem.config.errors import ConfigError
from tandem.flow.plan import Resident, RunPlan
from tandem.flow.sharing import share_trunks


def staying(old: RunPlan, new: RunPlan) -> dict[str, str]:
    """The models that both plans of a run have: name in the old one → name in the new one.

    Those of rewards are the same where they are opened alike, for they are called after the first term that asks for them.
    """
    own, theirs = ({score.resident for score in plan.scores} for plan in (old, new))
    names = {resident.name: resident.name for resident in old.residents if resident.name not in own}
    left = [resident for resident in new.residents if resident.name in theirs]
    for resident in (resident for resident in old.residents if resident.name in own):
        same = [one for one in left if _opened_as(one) == _opened_as(resident)]
        if same:
            chosen = min(same, key=lambda one: one.name != resident.name)
            names[resident.name] = chosen.name
            left.remove(chosen)
    return names


def _opened_as(resident: Resident) -> tuple[object, ...]:
    return resident.engine, resident.head, resident.adapter


def beside(old: RunPlan, new: RunPlan, device: str) -> RunPlan:
    """The new plan, in which each model that stays computes with the weights that it computes with in the old one.

    Example: two reward models share their trunk, and the term of the one that has it in its memory is taken away: refused.

    Raises:
        ConfigError: a model would go that lends its weights to one that stays.
    """
    names = staying(old, new)
    stay = tuple(_renamed(resident, names) for resident in old.residents if resident.name in names)
    fresh = [resident for resident in new.residents if resident.name not in names.values()]
    return replace(new, residents=(*stay, *_beside(stay, fresh, device)))


def _renamed(resident: Resident, names: dict[str, str]) -> Resident:
    lender = resident.trunk_of
    if lender is not None and lender not in names:
        raise ConfigError(
            f"the model of {lender!r} cannot go, because that of {names[resident.name]!r} shares its weights, which are in "
            f"memory once; let it count for nothing instead: reward.weight {lender}=0"
        )
    return replace(resident, name=names[resident.name], trunk_of=None if lender is None else names[lender])


def _beside(stay: tuple[Resident, ...], fresh: list[Resident], device: str) -> Iterator[Resident]:
    """The new models, each with the one whose weights it shares: a new one, or one that stays and has them itself."""
    owners = {resident.name: resident.trunk_of or resident.name for resident in stay}
    for resident in list(share_trunks([*stay, *fresh], device))[len(stay) :]:
        lender = resident.trunk_of
        yield resident if lender is None else replace(resident, trunk_of=owners.get(lender, lender))
