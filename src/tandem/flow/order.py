"""The order of the calls of a step: by the fields that they read, and by the state that they read and write.

A call waits for the last one that wrote a field or a state that it reads, and a call that writes a state also for those that
read it since. Fields alone would not do: publishing weights reads no field, and has to come after the update.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from tandem.flow.plan import Resident, RunPlan
from tandem.flow.stages import Stage

CONTROLLER = "controller"
"""The pool of what makes batches, judges and keeps: the script's own process."""

T = TypeVar("T")


class State(NamedTuple):
    """Something that a stage may change besides a batch."""

    memory: str
    """The resident in whose memory it is."""

    what: str
    """One of `tandem.api.stage.ROLE_STATES`."""


def memory_of(residents: Iterable[Resident]) -> dict[str, str]:
    """The resident in whose memory each resident is: the base of an actor's adapters is in the actor's, and models that
    share a trunk are in that of the one that lends it."""
    memory: dict[str, str] = {}
    for resident in residents:
        lender = resident.base_of or resident.trunk_of
        memory[resident.name] = resident.name if lender is None else memory[lender]
    return memory


def pools_of(plan: RunPlan) -> dict[str, str]:
    """The pool in which each role's calls run, one at a time: that of its model. Without a model it runs in the actor's."""
    memory = memory_of(plan.residents)
    pools = {}
    for role in plan.roles:
        kinds = {declared.kind for declared in role.calls.values()}
        asked = kinds <= {"collect", "keep"}
        pools[role.name] = CONTROLLER if asked else memory[role.models[0]] if role.models else "actor"
    return pools


class Order(Generic[T]):
    """The calls of a step that a further one waits for because of state. Who adds a field, the batch itself knows."""

    def __init__(self, memory: Mapping[str, str]):
        self._memory = memory
        self._wrote: dict[State, T] = {}
        self._read: dict[State, list[T]] = {}

    def states(self, stage: Stage) -> tuple[set[State], set[State]]:
        """The states that a stage reads, and those that it writes: one that delivers writes only those of the last model."""
        awake = [self._memory.get(name, name) for name in stage.awake]
        # it reads the trainer's weights and changes only the receiver's
        taking = awake[-1:] if stage.declared.kind == "deliver" else awake
        reads = {State(name, what) for name in awake for what in stage.declared.reads_state}
        return reads, {State(name, what) for name in taking for what in stage.declared.writes_state}

    def before(self, stage: Stage) -> list[T]:
        """The calls that this stage waits for."""
        reads, writes = self.states(stage)
        # A reader waits for the last writer; a writer also for the readers since, or they would see its values.
        found = [self._wrote[state] for state in sorted(reads | writes) if state in self._wrote]
        return found + [call for state in sorted(writes) for call in self._read.get(state, ())]

    def add(self, stage: Stage, call: T) -> None:
        """From now on stages may wait for this call."""
        reads, writes = self.states(stage)
        for state in reads:
            self._read.setdefault(state, []).append(call)
        for state in writes:
            self._wrote[state] = call
            # older readers are behind this write: whoever waits for it waits for them
            self._read[state] = []


def edges(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    """The graph of a run's step: earlier stage, later stage, and the field or ``model.state`` that ties them."""
    order: Order[Stage] = Order(memory_of(plan.residents))
    adds: dict[str, str] = {}
    for stage in plan.stages:
        declared = stage.declared
        if stage.kind != "score":  # it runs inside of the one that collects
            for name in (*declared.reads, *declared.may_read):
                if name in adds:
                    yield adds[name], stage.name, name
            reads, writes = order.states(stage)
            for earlier in dict.fromkeys(order.before(stage)):
                theirs = order.states(earlier)
                for state in sorted((reads | writes) & theirs[1] | writes & theirs[0]):
                    yield earlier.name, stage.name, ".".join(state)
            order.add(stage, stage)
            adds |= dict.fromkeys((*declared.adds, *declared.may_add), stage.name)
