"""A pool of processes that stay up: one alone, and a pair with a process group, each going through its cells."""

import contextlib
import datetime
import io
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tandem.trainers.process import Process
from tests.matrix.cells import Cell, cover, try_cell


def work(rank: int, ranks: int, cells: list[Cell], model: Path, out: Path) -> None:
    """Tries the cells of one number of ranks; rank 0 writes what came of them."""
    torch.set_num_threads(1)
    if ranks > 1:
        with contextlib.redirect_stderr(io.StringIO()):
            patience = datetime.timedelta(seconds=90)
            dist.init_process_group(
                "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks, timeout=patience
            )
    process = Process("cpu", 1, rank, ranks)
    with (out / f"results-{ranks}-{rank}.jsonl").open("w") as file:
        for cell in cells:
            print(json.dumps([*cell, try_cell(cell, model, process)]), file=file, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def results(model: Path, out: Path, cells: list[Cell] | None = None) -> dict[Cell, str]:
    """All cells, in their order, with `cells.RAN` or the reason of the refusal."""
    cells = cover() if cells is None else cells
    alone, together = ([cell for cell in cells if cell.ranks == ranks] for ranks in (1, 2))
    context = mp.spawn(work, (2, together, model, out), nprocs=2, join=False)
    work(0, 1, alone, model, out)
    while not context.join():
        pass
    found = {}
    for name in ("results-1-0", "results-2-0"):
        for line in (out / f"{name}.jsonl").read_text().splitlines():
            *cell, result = json.loads(line)
            found[Cell(*cell)] = result
    both = [(out / f"results-2-{rank}.jsonl").read_text() for rank in range(2)]
    assert both[0] == both[1], "the two ranks disagree on what is refused"
    return {cell: found[cell] for cell in cells}
