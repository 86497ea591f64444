"""Check which weights an inference server really serves: ask it some questions and score its answers.

examples:
  tandem verify-weights gsm8k/grpo vllm=http://127.0.0.1:8000
  tandem verify-weights gsm8k/grpo@200 tandem=http://127.0.0.1:8100 --token-file token
  tandem verify-weights smollm2-135m

The first argument is what should be served: a model, or a run (its newest checkpoint). For a run, the command also
recognises older checkpoints and the first weights. Without an address the embedded engine is asked. Nothing is changed. The
exit code is 1 if the server serves other weights. Training checks this by itself: see rollout.verify in docs/weights.md.
"""

import argparse

from tandem.models.precision import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN", help="what should be served: a model, or a run")
    parser.add_argument(
        "servers", nargs="*", metavar="KIND=URL", help="servers to ask: tandem=, vllm= or sglang= and an address"
    )
    parser.add_argument("--questions", type=int, default=16, help="questions to each server (default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="longest answer in tokens (default: 32)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the answers (default: 1)")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", *DTYPES), help="precision of the server (default: what is fast here)"
    )
    parser.add_argument("--tolerance", type=float, help="largest mean difference in nats (default: by precision)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token that the servers ask for")
    parser.add_argument("--admin-token-file", metavar="FILE", help="file with the token of their control routes")
    parser.add_argument("--json", action="store_true", help="one JSON object a server")
