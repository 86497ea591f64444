"""The arguments of `tandem serve` (`serving.py`) and `tandem serve-reward` (`serving_rewards.py`)."""

import argparse
import contextlib
import urllib.parse
from pathlib import Path
from typing import Any

from tandem.cli.arguments import TandemCommand, add_device_arguments
from tandem.cli.listening import add_address, add_media_store
from tandem.config.devices import ALONE
from tandem.config.rollout import CACHE_GIB, CPU_CHUNK, GPU_CHUNK, PLACES
from tandem.protocol.access import ServiceLimits

DEFAULTS = ServiceLimits(max_tokens=1)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a run (RUN or RUN@STEP), a hub name, or smollm2-135m")
    parser.add_argument("--name", help="the model's name in requests (default: the last part of MODEL)")
    add_address(parser, port=8000).add_argument(
        "--admin-token-file", type=Path, metavar="FILE", help="file with the token of the control routes; made if missing"
    )
    weights = parser.add_argument_group("weights")
    weights.add_argument(
        "--weights-root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="new weights may be read from folders below DIR",
    )
    parser.add_argument(
        "--media-host",
        type=_host,
        action="append",
        default=[],
        metavar="HOST",
        help="images and sounds may be fetched from URLs of this host (default: data URLs only)",
    )
    add_media_store(parser)
    weights.add_argument("--run", help="the training run that may use this server (default: the first that attaches)")
    _add_engine_arguments(parser.add_argument_group("engine"))
    bounds = parser.add_argument_group("bounds")
    for name, meaning in (
        ("max-completions", "most completions of one request: n times its prompts"),
        ("max-requests", "most completions at once; further requests get 503"),
        ("default-chat-tokens", "longest chat answer if the request sets no limit"),
    ):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        bounds.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    bounds.add_argument(
        "--request-timeout", type=float, default=DEFAULTS.request_timeout_s, metavar="S", help="default: 3600"
    )
    bounds.add_argument("--shutdown-timeout", type=float, default=DEFAULTS.shutdown_s, metavar="S", help="default: 30")


def _host(name: str) -> str:
    """Parses a host name or address into the form of `urlsplit(…).hostname`. A type for `argparse`."""
    with contextlib.suppress(ValueError):
        bare = f"[{name}]" if ":" in name and not name.startswith("[") else name
        host = urllib.parse.urlsplit(f"//{bare}").hostname
        if host and host == name.lower().strip("[]"):
            return host
    raise argparse.ArgumentTypeError(f"{name!r} is not a host: give the name alone, such as images.example.org")


def _add_engine_arguments(engine: Any) -> None:
    add_device_arguments(engine)
    engine.add_argument("--max-running", type=int, default=PLACES, help=f"default: {PLACES}")
    engine.add_argument(
        "--kv-cache-gib",
        type=float,
        help=f"default: {CACHE_GIB:g} on a CPU; on a GPU {ALONE:.0%}% of its memory less twice the weights",
    )
    chunks = f"{CPU_CHUNK} on a CPU, {GPU_CHUNK} on a GPU"
    engine.add_argument("--prefill-chunk-tokens", type=int, help=f"prompt tokens a step (default: {chunks})")
    engine.add_argument("--max-model-len", type=int, help="most tokens of prompt and answer (default: the model's context)")
    engine.add_argument("--keep-kv-on-update", action="store_true", help="keep the cache of running requests over an update")


SERVE = TandemCommand(
    """Serve a model over HTTP: OpenAI's protocol, and tokens with versions for training runs.

examples:
  tandem serve smollm2-135m
  tandem serve addition/grpo --port 8001 --name addition
  tandem serve smollm2-135m --weights-root runs          a training run may deliver weights from folders below runs/
  tandem serve smollm2-135m --host 0.0.0.0 --token-file ~/.tandem/token --allow-host gpu7.example.org

By default only this machine can connect. With a --host that other machines reach, every client needs the token. The control
routes always need the admin token. See docs/serve.md.
""",
    _add_arguments,
)


def _add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "models", nargs="+", metavar="[NAME=]FOLDER", help="reward models: checkpoints of `tandem reward`, or hub names"
    )
    parser.add_argument(
        "--class-label",
        action="append",
        default=[],
        metavar="[NAME=]CLASS",
        help="for a classifier with several classes: the name or number of the class whose log-odds are the score; once for "
        "each, with NAME= where several models are served",
    )
    add_address(parser, port=8001)
    add_media_store(parser)
    engine = parser.add_argument_group("engine")
    add_device_arguments(engine)
    engine.add_argument("--batch-size", type=int, default=64, help="most completions that are read at once (default: 64)")


SERVE_REWARD = TandemCommand(
    """Serve reward models over HTTP, for runs on other machines, or of other systems.

examples:
  tandem serve-reward runs/helpful/checkpoints/step_60
  tandem serve-reward helpful=runs/helpful/checkpoints/step_60 safe=runs/safety/checkpoints/step_40 --port 8001
  tandem serve-reward glad=CLASSIFIER rude=CLASSIFIER --class-label glad=joy --class-label rude=insult
  tandem train … reward="remote(url=http://127.0.0.1:8001, model=helpful) + 0.2*format"

By default only this machine can connect. With a --host that other machines reach, every client needs the token. Runs of
OpenRLHF use the route /get_reward. See docs/rewards.md.
""",
    _add_reward_arguments,
)
