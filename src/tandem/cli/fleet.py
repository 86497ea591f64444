"""List the inference servers of a run, and add or remove servers while it runs.

tandem fleet list RUN                                 every server, its state, and since when
tandem fleet add tandem=http://127.0.0.1:8000 RUN     add a server; it gets the current weights first
tandem fleet remove tandem=http://127.0.0.1:8000 RUN  remove one; it may finish its requests
tandem fleet remove embedded-1 RUN                    the same, for a server that the run started
tandem fleet remove machine-1/vllm-0 RUN              the same, for one that the run started on another machine

RUN is the run's folder. The command writes the file that the run watches: `rollout.fleet.watch`, or `servers` in RUN.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tandem.cli.arguments import run_folder
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.fleet import INSIDE, parse_address
from tandem.config.load import load_config
from tandem.config.machines import MACHINE
from tandem.engines.inference.fleet.addresses import (
    DEFAULT_NAME,
    JOURNAL_NAME,
    add_address,
    ask_to_leave,
    remove_address,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "add", "remove"), help="what to do")
    parser.add_argument("arguments", nargs="+", metavar="[SERVER] RUN", help="a server (not for list), and the run's folder")
    parser.add_argument("--json", action="store_true", help="list: one JSON object a server")


def run(arguments: argparse.Namespace) -> int:
    wanted = 1 if arguments.action == "list" else 2
    if len(arguments.arguments) != wanted:
        words = "RUN" if wanted == 1 else "SERVER RUN"
        raise ConfigError(f"write: tandem fleet {arguments.action} {words}; got {' '.join(arguments.arguments)}")
    folder = run_folder(arguments.arguments[-1])
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    if arguments.action == "list":
        return show(folder, as_json=arguments.json)
    server = arguments.arguments[0]
    watched = watched_by(folder)
    if arguments.action == "add":
        address = parse_address(server)
        new = add_address(watched, address)
        print(f"{address} {'joins within seconds' if new else 'is there already'} ({watched})")
    elif remove_address(watched, server):
        print(f"{server} leaves once it has finished what it has ({watched})")
    else:
        if server not in last_rows(folder):
            raise ConfigError(f"the run has no server {server}; it has {', '.join(last_rows(folder)) or 'none'}")
        place, _, name = server.partition("/") if server.startswith(MACHINE) else ("", "", server)
        watched = folder / place / DEFAULT_NAME if place else watched
        ask_to_leave(watched, name)
        print(f"{server} leaves once it has finished what it has ({watched})")
    return 0


def watched_by(folder: Path) -> Path:
    """The file or folder of addresses that the run reads."""
    config = load_config(TrainConfig, folder / "config.yaml").config
    if config.rollout.backend in INSIDE:
        raise ConfigError(f"{folder} generates with rollout.backend=embedded, one engine inside the run: there is no fleet")
    watch = config.rollout.fleet.watch
    return Path(watch).expanduser() if watch else folder / DEFAULT_NAME


def last_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """The last row of each server in the fault tables, by name; those that were retired are left out. A server of another
    machine than the first is called as its folder and itself: ``machine-1/vllm-0``."""
    last: dict[str, dict[str, Any]] = {}
    for journal in (folder / JOURNAL_NAME, *sorted(folder.glob(f"{MACHINE}*/{JOURNAL_NAME}"))):
        for line in journal.read_text(encoding="utf-8").split("\n") if journal.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:  # it is being written
                continue
            name = row["server"] if journal.parent == folder else f"{journal.parent.name}/{row['server']}"
            last[name] = row | {"server": name, "moved": row["moved"] + last.get(name, {}).get("moved", 0)}
    return {name: row for name, row in last.items() if row["to"] != "retired"}


def show(folder: Path, *, as_json: bool) -> int:
    """Prints the servers, as the fault table last saw them."""
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
