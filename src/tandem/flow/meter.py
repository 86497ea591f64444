"""The inference engine beside the trainer: how long it generated while the trainer trained, and its tokens."""

import time
from collections.abc import Mapping, Sequence

from tandem.api.engines import InferenceEngine
from tandem.flow.balance import Balance


class EngineMeter:
    """Hears of each stage that begins, or is a ``with`` block around training; knows how much of that time the engine was
    generating, and who waited for whom.

    Without an engine (ranks other than 0) all figures are 0. ``balance`` hears after each step who waited for whom.
    """

    def __init__(self, engine: InferenceEngine | None, balance: Balance | None = None):
        self.engine, self._balance = engine, balance
        self._began: float | None = None  # None: the trainer is not training
        self._busy_s = 0.0
        self._overlap = 0.0
        self._seen = (0.0, 0.0)
        self._preempted = 0.0
        self._asked: float | None = None  # None: the trainer is not waiting for a batch
        self._waited_s = 0.0
        self._last = time.perf_counter()

    def _statistics(self, name: str) -> float:
        return self.engine.statistics().get(name, 0.0) if self.engine is not None else 0.0

    def begins(self, phase: str) -> None:
        """A stage of this phase begins: training starts with the first one of `train`, and ends with the next other one."""
        if self._asked is not None:
            self._waited_s += time.perf_counter() - self._asked
        self._asked = time.perf_counter() if phase == "generate" else None
        if phase == "train" and self._began is None:
            self._began, self._busy_s = time.perf_counter(), self._statistics("busy_s")
        elif phase != "train" and self._began is not None:
            trained_s = max(time.perf_counter() - self._began, 1e-9)
            self._overlap = min(1.0, (self._statistics("busy_s") - self._busy_s) / trained_s)
            self._began = None

    def __enter__(self) -> None:
        self.begins("train")

    def __exit__(self, *_: object) -> None:
        self.begins("after training")

    def metrics(self) -> dict[str, float]:
        """``time/overlap``: share of the last training time during which the engine was generating, 0 to 1.
        ``time/trainer_wait``, ``time/engine_idle``: shares of the time since the last call in which the trainer waited for a
        batch, and in which the engine did not generate. ``tokens_per_s/generate``: tokens a second of the time that it was
        busy since the last call. Of a fleet also ``fleet/…``, of the embedded engine ``rollout/preempted``: how often since
        the last call a request gave its place in the cache away."""
        found = self.engine.statistics() if self.engine is not None else {}
        (tokens, busy_s), self._seen = self._seen, (found.get("generated_tokens", 0.0), found.get("busy_s", 0.0))
        rate = (self._seen[0] - tokens) / max(self._seen[1] - busy_s, 1e-9)
        now = time.perf_counter()
        passed_s, self._last = max(now - self._last, 1e-9), now
        waits = {
            "time/trainer_wait": min(1.0, self._waited_s / passed_s),
            "time/engine_idle": min(1.0, max(0.0, 1.0 - (self._seen[1] - busy_s) / passed_s)) if self.engine else 0.0,
        }
        self._waited_s = 0.0
        # those of a fleet, and of an engine of the user's
        more = {name: value for name, value in found.items() if "/" in name}
        if "preempted" in found:
            before, self._preempted = self._preempted, found["preempted"]
            more["rollout/preempted"] = self._preempted - before
        threads = self._balance.after_step(waits) if self._balance is not None else {}
        return {"time/overlap": self._overlap, **waits, **threads, "tokens_per_s/generate": rate, **more}


def of_all_ranks(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics of engines and rewards, from each rank's and how many samples it has judged: rates, preemptions
    and counts of fleets are added, of overlaps and longest times the largest counts, all else is a mean over the samples."""
    metrics = dict(found[0][1])
    for name in {name for _, own in found for name in own}:
        here = [(samples, own[name]) for samples, own in found if name in own]
        count = sum(samples for samples, _ in here)
        if "_per_s" in name or name == "rollout/preempted" or (name.startswith("fleet/") and name != "fleet/work_spread"):
            metrics[name] = sum(value for _, value in here)
        elif name in ("time/overlap", "time/trainer_wait", "time/engine_idle", "fleet/work_spread") or "_max" in name:
            metrics[name] = max(value for _, value in here)
        else:
            metrics[name] = sum(samples * value for samples, value in here) / count if count else here[0][1]
    return metrics
