"""Calls the stages of a step as soon as what they read is there: those of different models overlap by themselves.

A step gets promises in place of batches and metrics. What makes a batch runs at once, in the step's own process; every other
call returns at once, and waits in the pool of its role for the fields and states that it needs (`tandem.flow.draw`).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from tandem.flow.conductor import LocalConductor
from tandem.flow.draw import CONTROLLER, Order, memory_of, pools_of
from tandem.flow.stages import Stage

BOUNDS = "cu_seqlens"
"""The field of every batch, which no stage names."""

Output = Any
"""The batch or the metrics that a stage returns."""


class Span(NamedTuple):
    """The time in which a stage ran, in seconds of this machine's monotonic clock."""

    stage: str
    pool: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Promised:
    """A batch whose fields are still computed: the calls that add each or may add it, the newest first."""

    fields: Mapping[str, tuple["Future[Output]", ...]]

    def keys(self) -> Iterable[str]:
        """Names of the fields, also of those that may be added."""
        return self.fields.keys()

    def batch(self, names: Iterable[str] | None = None) -> TensorDict:
        """The fields of these names, as far as the batch has them; None: all. Waits for them."""
        found: dict[str, torch.Tensor] = {}
        asked = None if names is None else tuple(names)
        for name in self.fields:
            if asked is not None and name not in asked and name != BOUNDS and f"{name.split('/')[0]}/" not in asked:
                continue
            outputs = (promise.result() for promise in self.fields[name])
            field = next((output[name] for output in outputs if name in output.keys()), None)
            found |= {} if field is None else {name: field}
        return TensorDict(found, batch_size=[])

    def with_output(self, stage: Stage, output: "Future[Output]") -> "Promised":
        """The batch as a pass leaves it."""
        added = dict.fromkeys(stage.declared.adds, (output,))
        perhaps = {name: (output, *self.fields.get(name, ())) for name in stage.declared.may_add}
        return Promised({**self.fields, **added, **perhaps})


class FutureConductor(LocalConductor):
    """Lets each call wait in the pool of its role while the step goes on: a thread for each model of this process."""

    def __init__(self, around, residency, plan):
        super().__init__(around, residency, plan)
        self._memory, self._pools = memory_of(plan.residents), pools_of(plan)
        self._order, self._begun, self._threads = Order(self._memory), [], {}
        self.spans: list[Span] = []

    def call(self, stage: Stage, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Begins it in the pool of its role, and returns promises. In the controller's pool it is called at once."""
        pool, earlier = self._pools.get(stage.role, CONTROLLER), self._order.before(stage)
        if pool == CONTROLLER:
            wait(earlier)
            found = super().call(stage, work, *map(self.value, arguments), **{k: self.value(v) for k, v in named.items()})
            return _kept(found) if stage.kind == "collect" else found
        if pool not in self._threads:
            self._threads[pool] = ThreadPoolExecutor(1, f"pool-{pool}")
        output = self._threads[pool].submit(self._run, pool, stage, work, earlier, arguments, named)
        self._order.add(stage, output)
        self._begun.append((stage, output))
        batch = next((one for one in (*arguments, *named.values()) if isinstance(one, Promised)), None)
        return batch.with_output(stage, output) if stage.kind == "pass" and batch is not None else {output: stage.name}

    def _run(self, pool, stage, work, earlier, arguments, named):
        """In a thread of the pool."""
        for one in earlier:
            one.result()
        names = (*stage.declared.reads, *stage.declared.may_read)

        def given(one):
            return one.batch(names) if isinstance(one, Promised) else one

        ready, ready_by_name = [given(one) for one in arguments], {name: given(one) for name, one in named.items()}
        began_s = time.monotonic()
        try:
            return work(*ready, **ready_by_name)
        finally:
            self.spans.append(Span(stage.name, pool, began_s, time.monotonic()))

    def value(self, promised: Any) -> Any:
        """What was promised, as soon as it is there."""
        return promised.batch() if isinstance(promised, Promised) else promised

    def settle(self, batch: Any, metrics: Mapping[Any, Any]) -> tuple[Any, dict[str, float]]:
        """Waits for all calls of the step; the time of a stage is how long it was waited for here.

        Raises:
            Exception: of the first call that failed, after all have ended.
        """
        begun, self._begun, self._order = self._begun, [], Order(self._memory)
        for stage, output in begun:
            with self._around(stage):
                wait([output])
        for _, output in begun:
            output.result()
        self.spans = self.spans[-len(begun) :]
        found: dict[str, float] = {}
        for name, value in metrics.items():
            found |= name.result() if isinstance(name, Future) else {name: value}
        return self.value(batch), found


def _kept(batch: TensorDict) -> Promised:
    """A batch that is there."""
    output: Future[Output] = Future()
    output.set_result(batch)
    return Promised(dict.fromkeys(batch.keys(), (output,)))
