"""A machine as the plan sees it: memory, and how fast it does the few things that a step is made of."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from tandem.models.shape import BYTES, Dtype

Rates = Mapping[Dtype, tuple[tuple[int, float], ...]]
"""Per dtype: (rows of the left matrix, FLOP/s) of a matrix product, rows rising."""


@dataclass(frozen=True)
class Machine:
    """One kind of device, ``count`` of them. Rates are of one device, with all its threads where it is a CPU."""

    name: str
    kind: Literal["cpu", "gpu"]
    count: int
    """GPUs; 1 where it is a CPU, whose cores are ``threads``."""

    memory_gib: float
    """Memory of one device; on a CPU the memory that all processes share."""

    fast_bfloat16: bool
    matmul: Rates
    packed_matmul: Rates
    """Rates of the inference engine, which lays its weights out for the kernels."""

    attention: Mapping[Dtype, float]
    """FLOP/s of causal attention, forward and backward."""

    decode_attention: Mapping[Dtype, float]
    """Bytes/s of keys and values that one new token a sequence attends to."""

    elementwise: float
    """Bytes/s that norms, rotations, gates and residuals read and write."""

    stream: float
    """Bytes/s of passes over tensors that no cache holds: optimizer, gradients, copies of weights."""

    softmax: float
    """Elements/s of a softmax over a vocabulary."""

    operation_s: float
    """Seconds of one operation that does nothing: the interpreter, the dispatcher, and a GPU's launch."""

    digest: float
    """Bytes/s that one thread hashes."""

    link: float
    """Bytes/s between ranks, of one rank."""

    engine_operation_s: float = 0.0
    """The same in a decode step of the embedded engine; 0: as ``operation_s``."""

    host_link: float = math.inf
    """Bytes/s between device and host memory."""

    host_stream: float = math.inf
    """Bytes/s of passes over host memory, where the optimizer of an offloaded model works: of one GPU's share of it."""

    waking: float = math.inf
    """Bytes/s of models that sleep and wake on a CPU: pages are cleared, read, summed and given back."""

    process_gib: float = 0.0
    """Memory of one process before it holds a model: interpreter and libraries; on a GPU its context there."""

    worker_gib: float = 0.0
    """Host memory of one reward worker."""

    slack: float = 0.0
    """Holes between what comes and goes in turns, as a share of it: a GPU's allocator takes them on top."""

    heap_gib: float = 0.0
    """Freed memory that the heap of a training process on a CPU keeps; see `holes`."""

    engine_heap_gib: float = 0.0
    """The same of an embedded engine, in that process or its own."""

    deepspeed_gib: float = 0.0
    """Memory that DeepSpeed adds to a process that imports it."""

    threads: int = 1
    threading: float = 1.0
    """Speed of one process with all ``threads``, as a share of that of as many processes with a thread each, at once."""

    overlaps: bool = False
    """Communication between ranks goes on beside the computation."""

    sources: tuple[str, ...] = ()
    """The sources of the figures."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """The machine that a calibration was made on; it is made anew if this differs."""

    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted time of whole phases with all threads, fitted by benchmarks/plan.py; missing: 1. With one
    thread a phase takes what its operations take, in these runs: what is fitted is what threads lose to each other."""

    def rate(self, dtype: Dtype, rows: int, *, packed: bool = False) -> float:
        """FLOP/s of a product with so many rows; between the measured ones in the logarithm of both."""
        table = (self.packed_matmul if packed else self.matmul)[dtype]
        if rows <= table[0][0]:
            return table[0][1]
        for (low, slow), (high, fast) in zip(table, table[1:], strict=False):
            if rows <= high:
                share = math.log(rows / low) / math.log(high / low)
                return slow ** (1 - share) * fast**share
        return table[-1][1]

    def product_s(self, dtype: Dtype, rows: int, cells: int, *, packed: bool = False) -> float:
        """Seconds of ``[rows, in] × [in, out]`` with ``cells`` = in · out; never less than reading the cells takes."""
        return max(2 * rows * cells / self.rate(dtype, rows, packed=packed), cells * BYTES[dtype] / self.stream)

    def using(self, share: float) -> "Machine":
        """This machine where a share of its threads computes, which wait for each other less; a GPU is as fast as before."""
        if self.kind == "gpu" or share >= 1:
            return self
        factors = self.factors
        if self.threads > 1:  # all that threads lose to each other is won back where one is left
            lost = max(0.0, 1.0 + math.log(share) / math.log(self.threads))
            share /= self.threading ** (1.0 - lost)
            factors = {name: factor**lost for name, factor in factors.items()}

        def slower(rates: Rates) -> Rates:
            return {dtype: tuple((rows, rate * share) for rows, rate in table) for dtype, table in rates.items()}

        return replace(
            self,
            matmul=slower(self.matmul),
            packed_matmul=slower(self.packed_matmul),
            attention={dtype: rate * share for dtype, rate in self.attention.items()},
            decode_attention={dtype: rate * share for dtype, rate in self.decode_attention.items()},
            elementwise=self.elementwise * share,
            stream=self.stream * share,
            waking=self.waking * share,
            softmax=self.softmax * share,
            factors=factors,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives the same machine."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Machine":
        """The machine that `to_json` wrote. Raises `KeyError`, `TypeError` or `ValueError` where it is something else."""
        if set(data) != {f.name for f in fields(cls)}:
            raise ValueError("other fields than a machine has")
        tables = {
            name: {dtype: tuple((int(rows), float(rate)) for rows, rate in table) for dtype, table in data[name].items()}
            for name in ("matmul", "packed_matmul")
        }
        return cls(**{**data, **tables, "sources": tuple(data["sources"])})
