"""The cost of `tandem profile`: processor time of an operator on small tensors, with a profile and without.

python benchmarks/profile_cost.py [OPERATORS]
"""

import sys
import time

import torch

from tandem.api.activity import ProcessProfile, span


def cost_us(operators: int) -> float:
    """Microseconds of processor time of one operator, every hundredth of which has a span around it."""
    tensor = torch.zeros(8)
    began = time.process_time()
    for _ in range(operators // 100):
        with span("train: a hundred"):
            for _ in range(100):
                tensor.add(1.0)
    return (time.process_time() - began) / operators * 1e6


def main() -> None:
    operators = int(sys.argv[1]) if sys.argv[1:] else 20_000
    torch.set_num_threads(1)
    rounds = []
    for _ in range(5):
        plain, profile = cost_us(operators), ProcessProfile()
        recorded = cost_us(operators)
        profile.stop("cost")
        rounds.append((plain, recorded))
    plain, recorded = (min(costs) for costs in zip(*rounds, strict=True))
    print(f"an operator takes {plain:.2f} µs, recorded {recorded:.2f} µs: {recorded - plain:.2f} µs more")


if __name__ == "__main__":
    main()
