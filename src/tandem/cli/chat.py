"""Chat with a model in the terminal: one in a folder, or one on a server (tandem serve, or any with OpenAI's protocol).

examples:
  tandem chat smollm2-135m
  tandem chat addition/grpo --greedy --system "Answer with just the number."
  tandem chat http://127.0.0.1:8000 --temperature 0.7

/new begins a new conversation, /quit or Ctrl-D ends. The conversation is only appended to, never rewritten: a model in a
folder sees exactly the tokens that it made.
"""

import argparse
from pathlib import Path

from tandem.cli.sampling import add_device_arguments, add_sampling_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|URL",
        help="a folder, a run (RUN or RUN@STEP), a hub name, smollm2-135m, or a server's address",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message put before the conversation")
    add_sampling_arguments(parser, max_new_tokens=512, temperature=0.7)
    server = parser.add_argument_group("with a URL")
    server.add_argument("--name", help="which model, where the server has several (default: its first)")
    server.add_argument("--token-file", type=Path, metavar="FILE", help="the file with the server's token")
    add_device_arguments(parser.add_argument_group("with a MODEL"))
