"""The conductor of `runner=ray`: calls stages in the workers of their pools (`tandem.flow.on_ray`).

The step hands a batch of references (`Promised`) from stage to stage without reading it; the workers compute the fields.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from tandem.api.activity import waiting
from tandem.api.batch import Declaration
from tandem.flow.conductor import Around, LocalConductor
from tandem.flow.draw import Order, memory_of
from tandem.flow.on_ray import MIB, PING_S, Pool, Pools
from tandem.flow.plan import RunPlan
from tandem.flow.pool import Spent
from tandem.flow.residency import Residency
from tandem.flow.stages import Stage

BOUNDS = "cu_seqlens"
"""A field that every batch has and every stage reads, so no stage declares it."""


@dataclass(frozen=True)
class Promised:
    """A batch whose fields are references to tensors that workers compute. A field has several references, newest first, if
    a later call may have added the field again."""

    fields: Mapping[str, tuple[Any, ...]]
    fetch: Callable[[Any], torch.Tensor | None]
    """Waits for a reference and returns its tensor; None if its call did not add the field."""

    def keys(self) -> Iterable[str]:
        """Returns the names of the fields, including fields that may turn out to be missing."""
        return self.fields.keys()

    def __getitem__(self, name: str) -> torch.Tensor | None:
        """Waits for one field and returns it, without keeping a copy; None if no call added it."""
        return next((tensor for tensor in map(self.fetch, self.fields[name]) if tensor is not None), None)

    def batch(self) -> TensorDict:
        """Waits for all fields and returns those that exist."""
        tensors = {name: self[name] for name in self.fields}
        return TensorDict({name: tensor for name, tensor in tensors.items() if tensor is not None}, batch_size=[])

    def read_by(self, declared: Declaration) -> Iterator[tuple[str, Any]]:
        """Yields (name, reference) for every reference, newest first, of each field that a stage may read."""
        readable = (*declared.reads, *declared.may_read, BOUNDS)
        for name, references in self.fields.items():
            if name in readable or f"{name.split('/')[0]}/" in readable:
                yield from ((name, reference) for reference in references)

    def with_output(self, declared: Declaration, added: Mapping[str, Any]) -> "Promised":
        """Returns the batch after a pass that has added the references ``added``."""
        older = {name: self.fields.get(name, ()) for name in declared.may_add}
        fields = {name: (reference, *older.get(name, ())) for name, reference in added.items()}
        return replace(self, fields={**self.fields, **fields})


def added_by(declared: Declaration) -> tuple[str, ...]:
    """Returns the fields that a pass adds or may add; empty for other kinds of stage."""
    return tuple(dict.fromkeys((*declared.adds, *declared.may_add))) if declared.kind == "pass" else ()


class RayConductor(LocalConductor):
    """Calls stages in the workers of their pools. Stages that make batches, evaluate or save run in this process."""

    def __init__(self, pools: Pools, around: Around, residency: Residency, plan: RunPlan):
        super().__init__(around, residency, plan)
        self._pools, self._memory = pools, memory_of(plan.residents)
        self._order: Order[Any] = Order(self._memory)
        self._begun: list[tuple[Stage, Pool, list[Any]]] = []
        self._costs: list[tuple[Stage, list[Spent], float]] = []
        for role in plan.roles:
            if role.name in pools.of_role:
                stages = [role.stage(name) for name in role.calls]
                pools.roles[role.name].calls.update({stage.call: partial(self.now, stage) for stage in stages})
        self.calls: list[tuple[Stage, list[Spent], float]] = []
        """The calls of the last step: stage, cost in each process, and seconds that this process waited for it."""

    def run(self, stage: Stage, of: Any, *arguments: Any, **named: Any) -> Any:
        """Starts a stage in its pool and returns references; a stage without a pool runs here. The scores of a reward's
        model are waited for, because the choice of groups depends on them."""
        if stage.role not in self._pools.of_role:
            return super().run(stage, of, *arguments, **named)
        if stage.kind == "score":
            _, scores = self._begin(stage, ("score",), list(arguments[0].items()), (), {})
            self._finish()
            return self._pools.get(scores)
        batch = next((argument for argument in (*arguments, *named.values()) if isinstance(argument, Promised)), None)
        plain = [argument for argument in arguments if argument is not batch]
        plain_named = {name: argument for name, argument in named.items() if argument is not batch}
        fields = None if batch is None else list(batch.read_by(stage.declared))
        added = added_by(stage.declared)
        metrics, *outputs = self._begin(stage, added, fields, plain, plain_named)
        if added and batch is not None:
            return batch.with_output(stage.declared, dict(zip(added, outputs, strict=True)))
        return {metrics: stage.name}

    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Runs a stage in this process after all started calls have ended. A new batch is put into the object store."""
        self._finish()
        output = super().call(stage, work, *map(self.value, arguments), **{k: self.value(v) for k, v in named.items()})
        return self._stored(output) if stage.kind == "collect" else output

    def _stored(self, batch: TensorDict) -> Promised:
        """Puts the fields of a batch into the object store."""
        return Promised({str(name): (self._pools.ray.put(field),) for name, field in batch.items()}, self._pools.get)

    def now(self, stage: Stage, *arguments: Any, **named: Any) -> Any:
        """Runs a stage in its pool and waits, for a script with its own loop; returns a whole batch or metrics."""
        inputs = [self._stored(argument) if isinstance(argument, TensorDict) else argument for argument in arguments]
        output = self.run(stage, None, *inputs, **named)
        self._finish()
        self._costs.clear()
        return self.value(output)

    def _begin(
        self, stage: Stage, added: Sequence[str], fields: Sequence[tuple[str, Any]] | None, plain: Any, named: Any
    ) -> list[Any]:
        """Starts a call; returns the references of its metrics and of the fields that it adds. Ray runs the call after the
        fields that it reads are computed, after the earlier calls that it must follow, and after the previous call in its
        pool."""
        pool = self._pools.pools[self._pools.of_role[stage.role]]
        names = None if fields is None else [name for name, _ in fields]
        values, earlier = [value for _, value in fields or ()], self._order.before(stage)
        outputs = []
        for rank, member in enumerate(pool.members):
            returns = 1 if rank else 1 + len(added)
            waits = [*earlier, *pool.last[rank : rank + 1]]
            begin = member.run.options(num_returns=returns)
            reference = begin.remote(stage.role, stage.call, added, names, plain, named, *values, *waits)
            outputs.append(reference if returns > 1 else [reference])
        pool.last = [references[0] for references in outputs]
        self._order.add(stage, pool.last[0])
        self._begun.append((stage, pool, pool.last))
        return list(outputs[0])

    def value(self, promised: Any) -> Any:
        """Waits for a promised batch or promised metrics and returns them; returns any other value as it is."""
        if isinstance(promised, Promised):
            return promised.batch()
        return self._metrics(promised) if isinstance(promised, dict) else promised

    def _metrics(self, promised: Mapping[Any, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in promised.items():
            values |= {name: value} if isinstance(name, str) else self._pools.get(name)[0]
        return values

    def _finish(self) -> None:
        """Waits for all started calls. The first failure is raised immediately, even if other calls still wait for the
        failed one."""
        begun, self._begun, self._order = self._begun, [], Order(self._memory)
        pending = [reference for _, _, outputs in begun for reference in outputs]
        for stage, pool, outputs in begun:
            began = time.monotonic()
            with self._around(stage), waiting(f"{stage.name}, in a worker on Ray"):
                while any(reference in pending for reference in outputs):
                    self._pools.check()
                    done, pending = self._pools.ray.wait(pending, num_returns=1, timeout=PING_S)
                    for reference in done:
                        self._pools.get(reference)
            costs = [self._pools.get(reference)[1] for reference in outputs]
            self._pools.noticed(pool, costs[0].process)
            self._costs.append((stage, costs, time.monotonic() - began))

    def settle(self, batch: Any, metrics: Mapping[Any, Any]) -> tuple[Any, dict[str, float]]:
        """Waits for all calls of the step. The fields of the batch stay in the object store and are read on demand.

        Raises:
            TandemError: the error of the first call that failed.
        """
        self._finish()
        calls, self._costs = self._costs, []
        self.calls = calls
        totals = self._metrics(metrics)
        totals["remote/read_mib"] = sum(cost.read_bytes for _, costs, _ in calls for cost in costs) / MIB
        totals["remote/added_mib"] = sum(costs[0].added_bytes for _, costs, _ in calls) / MIB
        totals["remote/wait_s"] = sum(waited for *_, waited in calls)
        totals["remote/replaced"] = float(self._pools.replaced)
        for stage, costs, _ in calls:
            name = "remote/busy_s/" + stage.name.replace(": ", "_").replace(" ", "_")
            totals[name] = totals.get(name, 0.0) + costs[0].seconds
        return batch, totals
