"""The arguments of `tandem generate` and `tandem chat`; `generating.py` is what they do."""

import argparse
from pathlib import Path

from tandem.cli.arguments import TandemCommand, add_device_arguments, add_sampling_arguments


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a run (RUN or RUN@STEP), a hub name, or smollm2-135m")
    parser.add_argument("prompt", metavar="PROMPT", help="the question; - reads it from standard input")
    parser.add_argument("--n", type=int, default=1, help="number of answers (default: 1)")
    add_sampling_arguments(parser, max_new_tokens=256, temperature=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="only the k most probable tokens (default: 0, off)")
    parser.add_argument("--system", metavar="TEXT", help="a system message put before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt's text, without the chat template")
    add_device_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object: prompt, answers with log-probabilities, speed")


GENERATE = TandemCommand(
    """Let a model answer a prompt, with the embedded engine and the model's chat template.

examples:
  tandem generate smollm2-135m "What is the capital of France?"
  tandem generate addition/grpo@18 "3 + 4 =" --n 4 --temperature 0.7
  echo "Once upon a time" | tandem generate smollm2-135m - --raw --max-new-tokens 40
""",
    _add_arguments,
)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|URL",
        help="a folder, a run (RUN or RUN@STEP), a hub name, smollm2-135m, or a server's address",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message put before the conversation")
    add_sampling_arguments(parser, max_new_tokens=512, temperature=0.7)
    server = parser.add_argument_group("with a URL")
    server.add_argument("--name", help="the model to use if the server has several (default: its first)")
    server.add_argument("--token-file", type=Path, metavar="FILE", help="the file with the server's token")
    add_device_arguments(parser.add_argument_group("with a MODEL"))


CHAT = TandemCommand(
    """Chat with a model in the terminal: one in a folder, or one on a server (tandem serve, or any with OpenAI's protocol).

examples:
  tandem chat smollm2-135m
  tandem chat addition/grpo --greedy --system "Answer with just the number."
  tandem chat http://127.0.0.1:8000 --temperature 0.7

/new begins a new conversation, /quit or Ctrl-D ends. The conversation is only appended to, never rewritten: a model in a
folder sees exactly the tokens that it made.
""",
    _add_chat_arguments,
)
