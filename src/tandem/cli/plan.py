"""Say what a run will need before it starts: memory by phase, disk, and whether it fits. Nothing is started and no weights
are read, unless --measure asks for the time of a step here. docs/planning.md says how to read it.

examples:
  tandem plan examples/gsm8k_grpo.yaml
  tandem plan examples/gsm8k_grpo.yaml actor.path=Qwen/Qwen2.5-7B actor.backend=fsdp:d8 --device h200 --count 8
  tandem plan examples/gsm8k_sft.yaml --for sft --prompt-tokens 200 --measure
"""

import argparse

from tandem.cli.arguments import add_config_arguments, count
from tandem.planning.machine import DEVICES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    parser.add_argument("--device", metavar="NAME", help=f"plan for another machine: {', '.join(DEVICES)}")
    parser.add_argument("--count", type=count, default=None, metavar="N", help="number of these devices (default: 1)")
    parser.add_argument("--prompt-tokens", type=count, metavar="N", help="tokens of a prompt, instead of the data's mean")
    parser.add_argument("--measure", action="store_true", help="run three steps here, in a folder that is removed")
    parser.add_argument("--json", action="store_true", help="one JSON object; keys end in their unit")
