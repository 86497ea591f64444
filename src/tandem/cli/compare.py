"""Compare two finished evaluations of the same rows, paired row by row, with a test of significance.

With one sample a row: McNemar's exact test. With several: a permutation test that flips the sign of each row's difference.
Intervals of differences: paired bootstrap over rows. Mean rewards are compared as well, whatever they state.

A and B are evaluations, by folder or label, or runs: then their evaluations of the same rows are looked for.

examples:
  tandem compare evaluations/smollm2-135m evaluations/gsm8k-sft-step_156
  tandem compare addition/grpo@10 addition/grpo
"""

import argparse
import json

from tandem.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="an evaluation, or a run (RUN or RUN@STEP)")
    parser.add_argument("second", metavar="B", help="another; differences are B minus A")
    parser.add_argument("--seed", type=int, default=0, help="draws of bootstrap and permutations (default: 0)")
    parser.add_argument("--confidence", type=float, default=0.95, help="level of the intervals (default: 0.95)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from tandem.evaluation.compare import compare, describe, find_pair  # noqa: PLC0415 — imports torch

    if arguments.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {arguments.seed}")
    if not 0 < arguments.confidence < 1:
        raise ConfigError(f"--confidence must lie between 0 and 1, got {arguments.confidence}")
    first, second = find_pair(arguments.first, arguments.second)
    found = compare(first, second, seed=arguments.seed, confidence=arguments.confidence)
    print(json.dumps(found.as_json(), ensure_ascii=False) if arguments.json else describe(found))
    return 0
