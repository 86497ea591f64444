"""Measures how much of an adapter merged and rounded weights keep, after so many steps; docs/lora.md has its output.

    python benchmarks/lora.py                     # a tiny random model, rank 16, a minute
    python benchmarks/lora.py --steps 1 4 --rates 2e-4

Share: ⟨round(M) − round(W), M − W⟩ / |M − W|², W the base, M merged (`gap/adapter_surviving`), in bfloat16 and float32.
What an adapter's delivery takes is measured by ``python benchmarks/weight_update.py --lora-rank 16``.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engines_train.adapters import lora_on
from tests.engines_train.steps import random_batch, weighted_nll
from tests.tiny import tiny_model_folder

ENGINES = (torch.bfloat16, torch.float32)


def shares(folder: Path, dtype: str, rate: float, steps: list[int]) -> dict[torch.dtype, list[float]]:
    """Results of one training: dtype of the engine → share after each of ``steps``."""
    engine = lora_on(folder, dtype=dtype, rank=16, lr=rate)
    found: dict[torch.dtype, list[float]] = {served: [] for served in ENGINES}
    for step in range(1, max(steps) + 1):
        engine.train_batch(random_batch((7, 5, 9), seed=step), weighted_nll)
        if step in steps:
            for served in ENGINES:
                found[served].append(engine.adapter.surviving(served) or 0.0)
    return found


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 2e-4, 1e-3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = sorted(options.steps)
    print(f"| trained in | engine | learning rate | {' | '.join(f'step {step}' for step in steps)} |")
    print("|---" * (3 + len(steps)) + "|")
    with tempfile.TemporaryDirectory() as place:
        folder = tiny_model_folder(Path(place))
        for dtype in ("bfloat16", "float32"):
            for rate in options.rates:
                for served, found in shares(folder, dtype, rate, steps).items():
                    name = str(served).removeprefix("torch.")
                    print(f"| {dtype} | {name} | {rate:g} | {' | '.join(f'{share:.2f}' for share in found)} |", flush=True)


if __name__ == "__main__":
    main()
