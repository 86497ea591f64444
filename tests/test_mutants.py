"""The small mistakes that `scripts/mutations.py` makes: of every kind, each valid Python, and none in what is no formula."""

import ast

import pytest

from scripts.mutants import mutants

SOURCE = b'''
"""A page with 3 words."""
LIMIT = 2.0


@register("mine", 7)
def loss(policy: Tensor, rollout: Tensor, mask: Tensor, *, low: float = 0.5) -> Tensor[1]:
    """Takes 1 \xe2\x88\x92 low."""
    assert len(mask) == 9
    log.warning("seen %d", 4)
    if not low < 1:
        raise ValueError(f"low is {low + 1}, must be below {1}")
    ratio = (policy - rollout).detach().masked_fill(~mask, 0.0)
    for i in range(count):
        total += ratio[i] if mask.any() and low else ratio["a"] / ratio["b"]
    self.last = max(combined(policy, rollout), low)
    return total
'''


def by_kind(source=SOURCE):
    found = {}
    for one in mutants(source, "room/file.py"):
        found.setdefault(one.kind, set()).add((one.before, one.after))
    return found


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("operator", "policy - rollout", "((policy) + (rollout))"),
        ("term dropped", "policy - rollout", "(-(rollout))"),
        ("term dropped", "mask.any() and low", "((low))"),
        ("comparison", "low < 1", "((low) > (1))"),
        ("comparison", "low < 1", "((low) <= (1))"),
        ("and/or", "mask.any() and low", "((mask.any()) or (low))"),
        ("condition negated", "not low < 1", "(not (not low < 1))"),
        ("sign or not removed", "~mask", "(mask)"),
        ("constant", "2.0", "4.0"),
        ("constant", "0.5", "1.0"),
        ("off by one", "count", "count + 1"),
        ("other function", "max", "min"),
        ("call removed", "(policy - rollout).detach()", "(policy - rollout)"),
        ("arguments swapped", "combined(policy, rollout)", "combined(rollout, policy)"),
        ("argument mistaken", "policy", "rollout"),
        ("argument mistaken", '"a"', '"b"'),
        ("statement removed", "self.last = max(combined(policy, rollout), low)", "pass"),
    ],
)
def test_each_kind_of_mistake_is_made(kind, before, after):
    assert (before, after) in by_kind()[kind]


def test_every_mutant_is_python_that_differs_and_messages_and_annotations_stay():
    made = mutants(SOURCE, "room/file.py")
    for one in made:
        source = one.applied(SOURCE)
        assert source != SOURCE
        ast.parse(source)
    assert not {"3", "7", "9", "4", "low + 1", "Tensor[1]"} & {one.before for one in made}
    assert [one.after for one in made if one.before.startswith("raise")] == ["pass"]


def test_a_mutant_keeps_its_name_when_other_lines_change():
    names = [one.key for one in mutants(SOURCE, "room/file.py")]
    moved = [one.key for one in mutants(SOURCE.replace(b"LIMIT = 2.0", b"MORE = None\nLIMIT = 2.0"), "room/file.py")]
    assert names == moved
    assert len(set(names)) == len(names)
