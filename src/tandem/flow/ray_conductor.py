"""The conductor of `runner=ray`: calls stages in the workers of their pools (`tandem.flow.on_ray`)."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict

from tandem.api.activity import waiting
from tandem.flow.conductor import Around, LocalConductor
from tandem.flow.on_ray import MIB, PING_S, Pool, Pools
from tandem.flow.order import Order, memory_of
from tandem.flow.plan import RunPlan
from tandem.flow.pool import Spent
from tandem.flow.promised import Promised, added_by
from tandem.flow.residency import Residency
from tandem.flow.stages import Stage


class RayConductor(LocalConductor):
    """Calls stages in the workers of their pools. What makes a batch, judges or keeps runs here."""

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
        """The calls of the last step, with what each process spent, and the seconds that were waited here."""

    def run(self, stage: Stage, of: Any, *arguments: Any, **named: Any) -> Any:
        """Calls the method that a stage is: in a pool it begins, and references come back. The model of a reward is waited
        for, for what is chosen depends on it."""
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
        """Calls it here, when all that was begun is done. Of a batch the object store has the fields from then on."""
        self._finish()
        output = super().call(stage, work, *map(self.value, arguments), **{k: self.value(v) for k, v in named.items()})
        return self._laid(output) if stage.kind == "collect" else output

    def _laid(self, batch: TensorDict) -> Promised:
        """The batch, from now on in the object store."""
        return Promised({str(name): (self._pools.ray.put(field),) for name, field in batch.items()}, self._pools.get)

    def now(self, stage: Stage, *arguments: Any, **named: Any) -> Any:
        """Calls a stage in its pool for a script that has a loop of its own, and so gets whole batches and metrics."""
        inputs = [self._laid(argument) if isinstance(argument, TensorDict) else argument for argument in arguments]
        output = self.run(stage, None, *inputs, **named)
        self._finish()
        self._costs.clear()
        return self.value(output)

    def _begin(
        self, stage: Stage, added: Sequence[str], fields: Sequence[tuple[str, Any]] | None, plain: Any, named: Any
    ) -> list[Any]:
        """References of a call's metrics and of the fields that it adds. It waits for its fields, for earlier calls that it
        is to follow, and for the one before it in its pool."""
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
        """Reads a whole batch, or the metrics of a stage."""
        if isinstance(promised, Promised):
            return promised.batch()
        return self._metrics(promised) if isinstance(promised, dict) else promised

    def _metrics(self, promised: Mapping[Any, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in promised.items():
            values |= {name: value} if isinstance(name, str) else self._pools.get(name)[0]
        return values

    def _finish(self) -> None:
        """Waits for all calls that were begun; the first failure counts, also of one that others wait for."""
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
        """Waits for all calls of the step. The batch stays where it is, and can be asked for its fields.

        Raises:
            TandemError: of the first call that failed.
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
