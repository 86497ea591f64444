"""Commands about inference servers: `tandem fleet`, and the arguments of `tandem verify-weights` (`verifying.py`)."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tandem.cli.arguments import TandemCommand, configured_run
from tandem.config.devices import MACHINE
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.fleet import INSIDE, parse_address
from tandem.config.load import load_config
from tandem.engines.inference.fleet.addresses import (
    DEFAULT_NAME,
    JOURNAL_NAME,
    add_address,
    ask_to_leave,
    remove_address,
)
from tandem.models.hardware import DTYPES


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "add", "remove"), help="what to do")
    parser.add_argument("arguments", nargs="+", metavar="[SERVER] RUN", help="a server (not for list), and the run's folder")
    parser.add_argument("--json", action="store_true", help="list: one JSON object a server")


def _run(arguments: argparse.Namespace) -> int:
    num_arguments = 1 if arguments.action == "list" else 2
    if len(arguments.arguments) != num_arguments:
        words = "RUN" if num_arguments == 1 else "SERVER RUN"
        raise ConfigError(f"write: tandem fleet {arguments.action} {words}; got {' '.join(arguments.arguments)}")
    folder = configured_run(arguments.arguments[-1])
    if arguments.action == "list":
        return show(folder, as_json=arguments.json)
    server = arguments.arguments[0]
    watched = watched_by(folder)
    if arguments.action == "add":
        address = parse_address(server)
        new = add_address(watched, address)
        print(f"{address} {'joins within seconds' if new else 'is there already'} ({watched})")
    elif remove_address(watched, server):
        print(f"{server} leaves once its running requests have ended ({watched})")
    else:
        if server not in last_rows(folder):
            raise ConfigError(f"the run has no server {server}; it has {', '.join(last_rows(folder)) or 'none'}")
        place, _, name = server.partition("/") if server.startswith(MACHINE) else ("", "", server)
        watched = folder / place / DEFAULT_NAME if place else watched
        ask_to_leave(watched, name)
        print(f"{server} leaves once its running requests have ended ({watched})")
    return 0


def watched_by(folder: Path) -> Path:
    """Returns the file of server addresses that the run watches. Raises `ConfigError` if the run has no fleet."""
    config = load_config(TrainConfig, folder / "config.yaml").config
    if config.rollout.backend in INSIDE:
        raise ConfigError(f"{folder} generates with rollout.backend=embedded, one engine inside the run: there is no fleet")
    watch = config.rollout.fleet.watch
    return Path(watch).expanduser() if watch else folder / DEFAULT_NAME


def last_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the last row of each server in the fault tables, by name, without retired servers. The name of a server on a
    machine other than the first begins with the machine's folder: ``machine-1/vllm-0``."""
    last: dict[str, dict[str, Any]] = {}
    for journal in (folder / JOURNAL_NAME, *sorted(folder.glob(f"{MACHINE}*/{JOURNAL_NAME}"))):
        for line in journal.read_text(encoding="utf-8").split("\n") if journal.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:  # an unfinished line, which is being written
                continue
            name = row["server"] if journal.parent == folder else f"{journal.parent.name}/{row['server']}"
            last[name] = row | {"server": name, "moved": row["moved"] + last.get(name, {}).get("moved", 0)}
    return {name: row for name, row in last.items() if row["to"] != "retired"}


def show(folder: Path, *, as_json: bool) -> int:
    """Prints the servers with their last state in the fault table."""
    servers = last_rows(folder)
    if as_json:
        for row in servers.values():
            print(json.dumps(row, ensure_ascii=False))
        return 0
    if not servers:
        print(f"No servers: {folder / JOURNAL_NAME} names none.")
        return 0
    width = max(len(name) for name in servers)
    for name, row in servers.items():
        ago = max(0, round(time.time() - row["time"]))
        print(f"{name:<{width}}  {row['to']:<8}  for {ago} s  moved {row['moved']}  {row['why']}")
    return 0


FLEET = TandemCommand(
    """List the inference servers of a run, and add or remove servers while it runs.

tandem fleet list RUN                                 every server, its state, and since when
tandem fleet add tandem=http://127.0.0.1:8000 RUN     add a server; it gets the current weights first
tandem fleet remove tandem=http://127.0.0.1:8000 RUN  remove one; it may finish its requests
tandem fleet remove embedded-1 RUN                    the same, for a server that the run started
tandem fleet remove machine-1/vllm-0 RUN              the same, for a server that the run started on another machine

RUN is the run's folder. The command writes the file that the run watches: `rollout.fleet.watch`, or `servers` in RUN.
""",
    _add_arguments,
    _run,
)


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN", help="the expected weights: a model, or a run")
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
    parser.add_argument("--token-file", metavar="FILE", help="file with the servers' token")
    parser.add_argument("--admin-token-file", metavar="FILE", help="file with the token of their control routes")
    parser.add_argument("--json", action="store_true", help="one JSON object a server")


VERIFY_WEIGHTS = TandemCommand(
    """Check which weights an inference server really serves: ask it some questions and score its answers.

examples:
  tandem verify-weights gsm8k/grpo vllm=http://127.0.0.1:8000
  tandem verify-weights gsm8k/grpo@200 tandem=http://127.0.0.1:8100 --token-file token
  tandem verify-weights smollm2-135m

The first argument names the weights that the server should have: a model, or a run (its newest checkpoint). For a run, the
command also recognises older checkpoints and the initial weights. Without an address it checks the embedded engine. Nothing
is changed. The exit code is 1 if the server has other weights. Training does this check itself: see rollout.verify in
docs/weights.md.
""",
    _add_verify_arguments,
)
