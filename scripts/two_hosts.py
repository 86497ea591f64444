"""Two hosts on one Linux machine, and one run over both: `python scripts/two_hosts.py FOLDER [CASE …]`, as root.

Each host is a network namespace with an address, a host name and processes of its own; a virtual cable joins them, and
FOLDER is the disk that both see. The run is `examples/addition_grpo.yaml` with a tiny random model and two ranks. Cases,
all of them unless some are named:

    same        deterministic, one rank a host: the weights of two ranks on one host, to the bit
    servers     one server a host: the weights of one host with two servers
    asynchronous the same, while training goes on: each prompt once
    cut         the cable is pulled for 30 s in the middle: told of, and the weights of a run that was left alone, to the bit
    cut-servers the same with a server a host
    interrupted SIGTERM (as Ctrl-C) to the second host: both end, and the same commands go on to the same weights
    unshared    the second host has another disk: both refuse, and say so
    gone        the cable is pulled for good: both ends end the run, and name the other one

After each, no process may be left on either host. Exit status 1 if anything is not as said.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tiny import tiny_model_folder  # noqa: E402

STEPS, BATCH = 6, 4
WORDS = (
    "actor.backend=fsdp:d2 actor.dtype=float32 actor.optimizer.lr=0.01 rollout.dtype=float32 "
    "rollout.engine.kv_cache_gib=0.05 gconfig.n_samples=4 gconfig.max_new_tokens=8 train_dataset.size=64 threads=1 "
    f"rollout.batch_size={BATCH} evaluate.every_steps=3 evaluate.max_rows=8 checkpoint.every_steps=2 "
    f"total_train_steps={STEPS}"
).split()
ALIKE, SERVERS = ["deterministic=true"], ["rollout.backend=tandem:d2"]
CUT_S, GONE_S, LIMIT_S = 30.0, 20.0, 400.0
TOLERANCE = 1e-3
"""Most that weights may differ, of the way that training went, where samples were computed beside different others."""


class Hosts:
    """Two namespaces, ``host0`` and ``host1`` to each other; on leaving the block they and all in them are gone."""

    def __init__(self) -> None:
        self.names = [f"tandem-{os.getpid()}-{number}" for number in range(2)]

    def __enter__(self) -> "Hosts":
        hosts = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{number + 1} host{number}\n" for number in range(2))
        try:
            for name in self.names:
                _ip("netns", "add", name)
                Path("/etc/netns", name).mkdir(parents=True)
                Path("/etc/netns", name, "hosts").write_text(hosts)
            first, second = self.names
            _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
            for number, name in enumerate(self.names):
                _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            for process in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """The command, on that host."""
        named = f'hostname host{number}; exec "$@"'
        return ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c", named, "sh", *command]

    def processes(self, name: str) -> list[int]:
        """Those of a host."""
        done = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        return [int(number) for number in done.stdout.split()]

    def cable(self, state: str) -> None:
        """``down`` or ``up``."""
        _ip("-n", self.names[1], "link", "set", "cable", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why this machine cannot have two hosts; None if it can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "there is no `ip` here (iproute2, on Linux)"
    try:
        with Hosts() as hosts:
            subprocess.run(hosts.command(0, ["true"]), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}"
    return None


class Case:
    """Runs below a folder, and what is said of them."""

    def __init__(self, folder: Path, hosts: Hosts):
        self.folder, self.hosts, self.failures = folder, hosts, 0
        self.model = folder / "tiny-llama-0"
        self.started: list[subprocess.Popen[bytes]] = []

    def check(self, holds: object, words: str) -> None:
        """Prints one line; what does not hold counts as a failure."""
        self.failures += not holds
        print(f"  {'yes' if holds else 'NO '}  {words}", flush=True)

    def _command(self, root: Path, words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        config, reward = ROOT / "examples" / "addition_grpo.yaml", ROOT / "tests" / "trainers" / "small_rewards.py"
        given = [f"run.root={root}", f"actor.path={self.model}", f"reward={reward}:even", *WORDS, *words]
        return [sys.executable, "-P", "-m", "tandem", "launch", "local", str(config), *given, *more]

    def alone(self, name: str, words: Sequence[str]) -> Path:
        """The folder of a run on this machine; one that came to its end is not made again."""
        run = self.folder / name / "addition" / "grpo"
        if not _model(run).is_file():
            with (self.folder / f"{name}.out").open("wb") as out:
                command = self._command(self.folder / name, words)
                subprocess.run(command, check=True, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S)
        return run

    def on_two(self, name: str, words: Sequence[str], meanwhile: Callable[[Path], None] = lambda run: None) -> Path:
        """The folder of a run over both hosts, and whether they end well and leave nothing. ``meanwhile``: done once it
        has begun."""
        codes = self._on_two(name, words, meanwhile)
        self.check(codes == [0, 0], f"both ends are well: exit status {codes}")
        return self.folder / name / "addition" / "grpo"

    def _on_two(
        self,
        name: str,
        words: Sequence[str],
        meanwhile: Callable[[Path], None] = lambda run: None,
        apart: Sequence[str] = (),
    ) -> list[int]:
        """Exit statuses of both ends. ``apart``: a program that starts the second one."""
        root, self.started = self.folder / name, []
        for number in range(2):
            place = ["--machines", "2", "--machine", str(number), "--meet", "host0:29500"]
            with self.said(name, number).open("wb") as out:
                command = self.hosts.command(number, [*apart * number, *self._command(root, words, place)])
                self.started.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
                )
        meanwhile(root / "addition" / "grpo")
        codes = [process.wait(LIMIT_S) for process in self.started]
        left = [len(self.hosts.processes(host)) for host in self.hosts.names]
        self.check(left == [0, 0], f"no process is left on a host: {left}")
        return codes

    def said(self, name: str, number: int) -> Path:
        """File with all that the command on a host has printed."""
        return self.folder / f"{name}.{number}.out"

    def same(self) -> None:
        """Case ``same``."""
        self._alike(self.alone("one-host", ALIKE), self.on_two("two-hosts", ALIKE))

    def servers(self) -> None:
        """Case ``servers``."""
        self._served(self.on_two("two-with-servers", SERVERS))

    def asynchronous(self) -> None:
        """Case ``asynchronous``."""
        words = ["async_training=true", "rollout.max_head_offpolicyness=2"]
        run = self.on_two("two-asynchronous", [*SERVERS, *words])
        self._both_serve(run)
        self.check(len(_ledger(run)) == STEPS * BATCH, f"each prompt once: {len(_ledger(run))} in the ledger")

    def cut(self) -> None:
        """Case ``cut``."""
        self._alike(self.alone("one-host", ALIKE), self.on_two("two-cut", ALIKE, self._pull))
        self._told("two-cut")

    def cut_servers(self) -> None:
        """Case ``cut-servers``."""
        self._served(self.on_two("two-servers-cut", SERVERS, self._pull))
        self._told("two-servers-cut")

    def interrupted(self) -> None:
        """Case ``interrupted``."""

        def stop(run: Path) -> None:
            _until_step(run, 2)
            self.started[1].terminate()

        codes = self._on_two("two-interrupted", ALIKE, stop)
        self.check(codes[1] == 130 and codes[0], f"both ends are interrupted, or lose the other one: exit status {codes}")
        self._alike(self.alone("one-host", ALIKE), self.on_two("two-interrupted", ALIKE))

    def unshared(self) -> None:
        """Case ``unshared``."""
        (self.folder / "two-disks").mkdir(exist_ok=True)
        mounted = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {self.folder / "two-disks"}; exec "$@"', "sh"]
        codes = self._on_two("two-disks", ALIKE, apart=mounted)
        words = self.said("two-disks", 0).read_text()
        self.check("host1 does not see the run folder" in words and 0 not in codes, f"host1 is named: exit status {codes}")

    def gone(self) -> None:
        """Case ``gone``."""
        began = []

        def pull(run: Path) -> None:
            _until_step(run, 2)
            began.append(time.monotonic())
            self.hosts.cable("down")

        codes = self._on_two("two-gone", [*SERVERS, f"recover.cut_off_after_s={GONE_S:g}"], pull)
        took_s = time.monotonic() - began[0]
        self.hosts.cable("up")
        words = [self.said("two-gone", number).read_text() for number in range(2)]
        named = all(f"machine {1 - number} has been silent" in words[number] for number in range(2))
        self.check(named and 0 not in codes, f"both ends name the other one: exit status {codes}")
        self.check(took_s < GONE_S + 30, f"and have ended {took_s:.0f} s after the cable was pulled")

    def _pull(self, run: Path) -> None:
        _until_step(run, 2)
        self.hosts.cable("down")
        time.sleep(CUT_S)
        self.hosts.cable("up")

    def _told(self, name: str) -> None:
        told = re.search(r"machine 1 has been silent for 1[5-9] s", self.said(name, 0).read_text())
        self.check(told is not None, "the cut was told of after 15 s")

    def _alike(self, one: Path, other: Path) -> None:
        theirs, ours = _weights(one), _weights(other)
        equal = theirs.keys() == ours.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        self.check(equal, f"the weights of one host, to the bit: {len(ours)} tensors after step {STEPS}")
        self.check(_ledger(one) == _ledger(other), f"each prompt once: {len(_ledger(other))} in the ledger, the same ones")

    def _served(self, run: Path) -> None:
        one = self.alone("one-with-servers", SERVERS)
        before, theirs, ours = (load_file(path) for path in (self.model / "model.safetensors", _model(one), _model(run)))
        share = _distance(theirs, ours) / _distance(before, theirs)
        self.check(share < TOLERANCE, f"the weights of one host with two servers: {share:.1e} of the way that training went")
        self.check(_ledger(one) == _ledger(run), f"each prompt once: {len(_ledger(run))} in the ledger, the same ones")
        self._both_serve(run)

    def _both_serve(self, run: Path) -> None:
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        logs = [log.relative_to(run) for log in run.glob("**/servers-logs/*.log")]
        self.check(last["fleet/healthy"] == len(logs) == 2, f"a server on each host: {', '.join(map(str, sorted(logs)))}")


def _until_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    file = run / "metrics.jsonl"
    while not (file.is_file() and f'"step": {step}' in file.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} has not come to step {step}")
        time.sleep(0.1)


def _model(run: Path) -> Path:
    return run / "checkpoints" / f"step_{STEPS}" / "model.safetensors"


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(_model(run))


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5


def _ledger(run: Path) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        return ledger.execute("select epoch, place, reason from prompts where trained order by epoch, place").fetchall()


CASES = ("same", "servers", "asynchronous", "cut", "cut-servers", "interrupted", "unshared", "gone")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Case]:
    """Hosts and a model, for cases below the folder."""
    with Hosts() as hosts:
        tiny_model_folder(folder)
        yield Case(folder, hosts)


def run_case(case: Case, name: str) -> int:
    """Runs one of `CASES`; returns how many things were not as said."""
    before = case.failures
    print(name, flush=True)
    getattr(case, name.replace("-", "_"))()
    return case.failures - before


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts go in any case
    names = sys.argv[2:] or CASES
    if unknown := set(names) - set(CASES):
        sys.exit(f"there is no case {', '.join(sorted(unknown))}: {', '.join(CASES)}")
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).resolve()
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        sys.exit(f"{place} is not empty: runs that are there would go on, or be over already; name a new folder")
    with opened(place) as opened_case:
        sys.exit(sum(run_case(opened_case, name) for name in names) > 0)
