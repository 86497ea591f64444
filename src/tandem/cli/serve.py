"""Serve a model over HTTP: OpenAI's protocol, and tokens with versions for training runs.

examples:
  tandem serve smollm2-135m
  tandem serve addition/grpo --port 8001 --name addition
  tandem serve smollm2-135m --weights-root runs          a training run may deliver weights from folders below runs/
  tandem serve smollm2-135m --host 0.0.0.0 --token-file ~/.tandem/token --allow-host gpu7.example.org

It listens on this machine only unless --host says otherwise, and then everyone needs the token. The control routes always
need the admin token. See docs/serve.md.
"""

import argparse
import contextlib
import urllib.parse
from pathlib import Path
from typing import Any

from tandem.cli.listening import add_address, add_media_store
from tandem.cli.sampling import add_device_arguments
from tandem.config.devices import ALONE
from tandem.config.engine_memory import CACHE_GIB, CPU_CHUNK, GPU_CHUNK, PLACES
from tandem.engines.inference.serve.limits import ServiceLimits

DEFAULTS = ServiceLimits(max_tokens=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a run (RUN or RUN@STEP), a hub name, or smollm2-135m")
    parser.add_argument("--name", help="the model's name in requests (default: the last part of MODEL)")
    add_address(parser, port=8000).add_argument(
        "--admin-token-file", type=Path, metavar="FILE", help="token of the control routes; made if missing"
    )
    weights = parser.add_argument_group("weights")
    weights.add_argument(
        "--weights-root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="new weights may be read from folders below it",
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
    weights.add_argument("--run", help="the training run that it belongs to (default: the first that attaches)")
    _add_engine_arguments(parser.add_argument_group("engine"))
    bounds = parser.add_argument_group("bounds")
    for name, what in (
        ("max-completions", "n times prompts of one request"),
        ("max-requests", "completions under way, then 503"),
        ("default-chat-tokens", "length of a chat answer that does not say"),
    ):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        bounds.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    bounds.add_argument(
        "--request-timeout", type=float, default=DEFAULTS.request_timeout_s, metavar="S", help="default: 3600"
    )
    bounds.add_argument("--shutdown-timeout", type=float, default=DEFAULTS.shutdown_s, metavar="S", help="default: 30")


def _host(name: str) -> str:
    """A host as URLs are compared with it."""
    with contextlib.suppress(ValueError):
        bare = f"[{name}]" if ":" in name and not name.startswith("[") else name
        host = urllib.parse.urlsplit(f"//{bare}").hostname
        if host and host == name.lower().strip("[]"):
            return host
    raise argparse.ArgumentTypeError(f"{name!r} is no host: give the name alone, such as images.example.org")


def _add_engine_arguments(engine: Any) -> None:
    add_device_arguments(engine)
    engine.add_argument("--max-running", type=int, default=PLACES, help=f"default: {PLACES}")
    engine.add_argument(
        "--kv-cache-gib",
        type=float,
        help=f"default: {CACHE_GIB:g} on a CPU; on a GPU {ALONE:.0%}% of it less twice the weights",
    )
    chunks = f"{CPU_CHUNK} on a CPU, {GPU_CHUNK} on a GPU"
    engine.add_argument("--prefill-chunk-tokens", type=int, help=f"prompt tokens a step (default: {chunks})")
    engine.add_argument("--max-model-len", type=int, help="most tokens of prompt and answer (default: the model's context)")
    engine.add_argument("--keep-kv-on-update", action="store_true", help="keep the cache of running requests over an update")
