"""Workers that stay up: a process alone, and a pair with a process group, each going through its cells of a matrix.

A matrix is a module with `Cell` (a NamedTuple with ``ranks``), `cover`, and `try_cell`.
"""

import contextlib
import datetime
import importlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.flow.process import Process
from tests.ranks import start

SIZES = (1, 2)
PATIENCE_S = 300.0


def work(rank: int, ranks: int, matrix: str, cells: list[Any], model: Path, out: Path) -> None:
    """Tries the cells of one number of ranks; each rank writes what came of them."""
    torch.set_num_threads(1)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(out / "programs"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if ranks > 1:
        os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        with contextlib.redirect_stderr(io.StringIO()):
            patience = datetime.timedelta(seconds=PATIENCE_S)
            dist.init_process_group(
                "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks, timeout=patience
            )
    process, try_cell = Process("cpu", 1, rank, ranks), importlib.import_module(matrix).try_cell
    with (out / f"results-{ranks}-{rank}.jsonl").open("w") as file:
        for cell in cells:
            try:
                result = try_cell(cell, model, process)
            except Exception as error:
                raise AssertionError(f"{cell} neither runs nor is refused: {type(error).__name__}: {error}") from error
            print(json.dumps([*cell, result]), file=file, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def results(matrix: str, model: Path, out: Path, cells: list[Any] | None = None) -> dict[Any, str]:
    """All cells of the module ``matrix``, in their order, with `RAN` or the reason of the refusal."""
    module = importlib.import_module(matrix)
    cells = module.cover() if cells is None else cells
    groups = []
    for ranks in SIZES:
        own = [cell for cell in cells if cell.ranks == ranks]
        groups.append(start(work, (ranks, matrix, own, model, out), ranks))
    try:
        while sum(group.join(timeout=1.0) for group in groups) < len(groups):
            pass
    finally:
        for process in (process for group in groups for process in group.processes if process.is_alive()):
            process.kill()
            process.join()
    found = {}
    for ranks in SIZES:
        told = {(out / f"results-{ranks}-{rank}.jsonl").read_text() for rank in range(ranks)}
        assert len(told) == 1, "the ranks disagree on what is refused"
        for line in told.pop().splitlines():
            *cell, result = json.loads(line)
            found[module.Cell(*cell)] = result
    return {cell: found[cell] for cell in cells}
