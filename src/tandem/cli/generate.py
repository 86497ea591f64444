"""Let a model answer a prompt, with the embedded engine and the model's chat template.

examples:
  tandem generate smollm2-135m "What is the capital of France?"
  tandem generate addition/grpo@18 "3 + 4 =" --n 4 --temperature 0.7
  echo "Once upon a time" | tandem generate smollm2-135m - --raw --max-new-tokens 40
"""

import argparse

from tandem.cli.sampling import add_device_arguments, add_sampling_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a run (RUN or RUN@STEP), a hub name, or smollm2-135m")
    parser.add_argument("prompt", metavar="PROMPT", help="the question; - reads it from standard input")
    parser.add_argument("--n", type=int, default=1, help="number of answers (default: 1)")
    add_sampling_arguments(parser, max_new_tokens=256, temperature=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="only the k most probable tokens (default: 0, off)")
    parser.add_argument("--system", metavar="TEXT", help="a system message put before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    add_device_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object: prompt, answers with log-probabilities, speed")
