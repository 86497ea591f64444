"""Nothing that a run remembers is left out of its checkpoints: what changes while it trains is found, and must be listed."""

import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tandem.api.engines import InferenceEngine
from tandem.api.state import Stateful
from tandem.config.arithmetic import total_steps
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import start_process
from tandem.flow.session import SAVED, STATELESS, Session
from tandem.lifecycle.recovery import Progress, parts_of
from tandem.trainers.loop import step

REMEMBERED = {
    "actor.version",
    "actor.kl_coefficient",
    "critic.updates",
    "reference.refreshed",
    "loader.position",
    "loader.rates",
    "loader._order",
    "loader.epoch",
    "constraint.multiplier",
    "publisher._version",
    "publisher._history",
    "publisher._archive._kept",
    "rollout._pool._book._count",
    "rollout.replay._entries",
    "rollout.replay.reused",
    "trainer.holder.masters",
    "trainer.optimizer._step",
    "critic.engine.holder.masters",
    "critic.engine.optimizer._step",
    "reference.engine.holder.masters",
    "combination.spreads",
}
"""Saved, each by the `state_dict` of its part."""

OF_THE_LEDGER = "rollout._pool._book.ledger."
"""Saved in `ledger.sqlite`, with the step; counts of failed samples in the pool's state."""

FORGOTTEN = {
    "actor._warned": "a warning is given once a process",
    "rollout._metrics": "of the last batch; its line is written",
    "rollout.last_groups": "of the last batch; its line is written",
    "rollout.replay._last": "of the last batch; its line is written",
    "rollout._pool._book._dropped": "taken for the record of the step",
    "rollout._pool._book._taken": "empty between two steps",
    "rollout._pool._book.waiting": "begun and not consumed: begins anew",
    "rollout._pool._book.running": "begun and not consumed: begins anew",
    "rollout._pool._book._budget.beginning": "watches the first groups of a process",
    "rollout._pool._book._source": "the loader, which is a part, and the workflow, which has no state",
    "rollout._pool._book.gate.running": "counts what begins anew",
    "rollout._pool._book.gate.waiting": "counts what begins anew",
    "rollout._pool._book.gate.taken": "0 between two steps",
    "trainer.holder.lent": "true within a verification, false between two steps",
    "trainer.holder._parameters": "what the model computes with, made from the masters",
    "critic.engine.holder._parameters": "likewise",
    "trainer.optimizer.step_size._squares": "of the last step; its line is written",
    "critic.engine.optimizer.step_size._squares": "likewise",
    "reference.engine.holder._parameters": "likewise",
    "rollout._scorer.conductor._residency._timer": "measures time",
    "rollout._scorer.conductor._residency._models": "the engines of models, which are parts or frozen",
    "reference._followed": "the actor's engine, which is a part",
    "publisher._engines": "see the engine in STATELESS",
    "publisher.channel": "where tensors lie until the engine has taken them",
}
"""Not saved, and why that changes nothing."""


def told(value, depth=0):
    """The data in a value, in a form that can be compared; None where it has none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.layout == torch.strided else None
    if isinstance(value, (Mapping, Counter)):
        return {repr(key): told(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque, set)):
        return [told(item, depth + 1) for item in value]
    if type(value).__module__.startswith("tandem.") and depth < 4:
        own = getattr(value, "__dict__", None)
        return repr(value) if own is None else {name: told(item, depth + 1) for name, item in own.items()}
    return None


def attributes(value, path, seen, depth=3):
    """Path → what it says, of every attribute of ours below an object; objects that were seen before are left out."""
    seen.add(id(value))
    for name, inner in vars(value).items():
        where = f"{path}.{name}"
        if isinstance(inner, (InferenceEngine, torch.nn.Module)) or id(inner) in seen:
            continue  # an engine of inference: see STATELESS; the weights of a module are the masters of its holder
        if type(inner).__module__.startswith("tandem.") and not dataclasses.is_dataclass(inner) and depth:
            yield from attributes(inner, where, seen, depth - 1)
        else:
            yield where, told(inner)


def snapshot(session):
    found, seen = {}, set()
    for name in ("trainer", "reference", "critic", "combination", *SAVED):
        part = session.parts[name]
        if id(part) not in seen:
            found |= dict(attributes(part, name, seen))
    return found


@pytest.fixture
def session(overrides):
    items = [*overrides, "algorithm=ppo", "algorithm.kl.coefficient=0.1", "algorithm.kl.target=0.01", "deterministic=true"]
    items += ["reference.refresh_every_steps=2", "curriculum.round_rows=6", "rollout.replay.groups=1"]
    items += ["rollout.verify.every_steps=2", "total_train_steps=4"]
    rewards = Path(__file__).parent / "small_rewards.py"
    items += [
        f"reward={rewards}:even(normalise=running) + {rewards}:harmful",
        "constraint.cost=harmful",
        "constraint.limit=0.1",
    ]
    config = load_config(TrainConfig, None, list({item.partition("=")[0]: item for item in items}.values())).config
    rows = open_rows(config)
    process = start_process(config)
    try:
        with open_session(config, process, rows, total_steps(config, len(rows.train)), "run") as session:
            yield session
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_field_and_role_of_a_session_is_a_part_or_has_a_reason_not_to_be(session):
    fields = {field.name for field in dataclasses.fields(Session)} - {"roles"}
    assert set(SAVED) | set(STATELESS) == fields | set(session.roles) | {"teacher", "combination", "trainer"}
    assert set(SAVED) & set(STATELESS) == set()


def test_whatever_changes_while_a_run_trains_is_saved_or_has_a_reason_not_to_be(session):
    before = snapshot(session)
    for _ in range(2):
        step(session)
    after = snapshot(session)

    changed = {path for path in after if after[path] != before.get(path)}
    unknown = {p for p in changed if p not in REMEMBERED and p not in FORGOTTEN and not p.startswith(OF_THE_LEDGER)}
    assert not {p for p in unknown if not p.startswith(tuple(f"{name}." for name in FORGOTTEN))}, (
        "new state: give it to the state_dict of its part and list it here, or say here why it need not be saved"
    )
    seen = {"actor.version", "actor.kl_coefficient", "critic.updates", "reference.refreshed", "loader.rates"}
    assert seen | {path for path in REMEMBERED if "engine" in path or "trainer" in path} <= changed
    for name, part in (vars(session) | session.roles).items():
        assert name in SAVED or not isinstance(part, Stateful)
    parts = parts_of(session, Progress(), None, None, "cpu")
    assert list(parts) == ["progress", *SAVED, "random"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.rollout.standing_still())
        states = {name: part.state_dict() for name, part in parts.items()}
    assert states["trainer"]["optimizer"]["step"] == 2 and states["reference"]["engine"] is not None
    assert len(states["rollout"]["replay"]["kept"]) > 0 and states["loader"]["rates"]
