"""Seconds of reading a model's base once more, as an engine does when it takes an adapter, beside copies kept in memory.

python benchmarks/base_reading.py                     # SmolLM2-135M: 269 MB; medians of several rounds
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from tandem.api.weights import FolderSource
from tandem.models.catalog import resolve


def seconds(work: Callable[[], None], rounds: int) -> float:
    """The median, after one round for warmth."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken[1:]), 4)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    folder = resolve(args.model)
    kept = {name: tensor.clone() for name, tensor in FolderSource(folder).tensors()}

    def read() -> None:
        for _, tensor in FolderSource(folder).tensors():
            tensor.clone()

    def copy() -> None:
        for tensor in kept.values():
            tensor.clone()

    num_bytes = sum(tensor.nbytes for tensor in kept.values())
    print(json.dumps({"bytes": num_bytes, "read_s": seconds(read, args.rounds), "kept_s": seconds(copy, args.rounds)}))


if __name__ == "__main__":
    main()
