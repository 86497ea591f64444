"""The folder of a run: who holds it, what it says of itself, where its files are."""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from tandem.config.errors import ConfigError
from tandem.state.existing import existing_run, last_metrics
from tandem.state.machine import git_commit, machine, versions
from tandem.state.names import check_name

Status = Literal["finished", "interrupted", "failed"]
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RunFolderInUse(ConfigError):
    """Another process is writing to the folder."""


class RunFolderTaken(ConfigError):
    """The folder holds a run."""


def now() -> str:
    """The time to the second, with its offset, such as 2030-05-01T09:30:00+00:00."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime())


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old text or the new one, whole."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def run_path(root: str | Path, experiment: str, trial: str) -> Path:
    """`<root>/<experiment>/<trial>`, the names checked."""
    parts = check_name("experiment_name", experiment), check_name("trial_name", trial)
    try:
        return Path(root).expanduser().joinpath(*parts)
    except RuntimeError as error:
        raise ConfigError(f"run.root={root} begins with a home folder that nobody has: {error}") from error


class RunFolder:
    """`<root>/<experiment>/<trial>/`, held by this process until `close`; a context manager.

    Leaving the ``with`` block says how the run ended: finished, interrupted (Ctrl-C) or failed with the error.

    Example::

        with RunFolder.open("runs", "gsm8k", "first", config_text="seed: 1\\n", seed=1) as run:
            (run.path / "notes.txt").write_text("…")
    """

    def __init__(self, path: Path, lock: IO[str], info: dict[str, Any]):
        self.path = path
        self.info = info
        self._lock: IO[str] | None = lock
        self._began = time.monotonic()
        self._handlers: list[logging.Handler] = []

    @classmethod
    def open(cls, root: str | Path, experiment: str, trial: str, *, config_text: str, seed: int | None = None) -> Self:
        """Makes the folder, takes its lock and writes `config.yaml` and `run.json`; logs go to `log.txt` from here on.

        Raises:
            RunFolderInUse: another process holds it; says which.
            RunFolderTaken: a run is there; says what of it, and how to proceed.
            ConfigError: a name that is not a folder's, or a root that cannot be written.
        """
        path = run_path(root, experiment, trial)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise ConfigError(f"run.root={root} cannot hold the run folder {path}: {error.strerror or error}") from error
        try:
            refuse_existing(path)
            info = {
                "id": f"{experiment}/{trial}/{secrets.token_hex(4)}",
                "experiment": experiment,
                "trial": trial,
                "status": "running",
                "started": now(),
                "seed": seed,
                "versions": versions(),
                "git": git_commit(),
                "machine": machine(),
            }
            run = cls(path, lock, info)
            write_atomically(path / "config.yaml", config_text)
            run._write_info()
            run._start_logging()
        except BaseException:
            lock.close()
            raise
        return run

    @property
    def id(self) -> str:
        """The run's own name: no other run has it, also one of the same experiment and trial elsewhere."""
        return str(self.info["id"])

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, `step_N/` each; it need not exist yet."""
        return self.path / "checkpoints"

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """Records how the run ended and lets go of the folder; only the first call counts."""
        if self._lock is None:
            return
        ended = {"status": status, "ended": now(), "seconds": round(time.monotonic() - self._began, 1)}
        self.info |= ended | {"steps": last_metrics(self.path).get("step", 0)}
        if error is not None:
            self.info["error"] = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        try:
            self._write_info()
        finally:
            self.close()

    def close(self) -> None:
        """Stops logging here and frees the lock; a folder closed without `finish` counts as killed."""
        tandem = logging.getLogger("tandem")
        for handler in self._handlers:
            tandem.removeHandler(handler)
            handler.close()
        self._handlers = []
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # explicitly: forked children share the descriptor
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish("finished")
        elif isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.finish("interrupted")
        else:
            logging.getLogger("tandem.state").info("the run failed", exc_info=error)  # to log.txt
            self.finish("failed", error)

    def _write_info(self) -> None:
        write_atomically(self.path / "run.json", json.dumps(self.info, indent=2, ensure_ascii=False) + "\n")

    def _start_logging(self) -> None:
        """INFO and above of `tandem.*` to log.txt, warnings to the terminal too unless the script set logging up itself."""
        tandem = logging.getLogger("tandem")
        tandem.setLevel(min(tandem.level or logging.INFO, logging.INFO))
        to_file = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        to_file.setFormatter(logging.Formatter(LOG_FORMAT))
        self._handlers = [to_file]
        if not tandem.hasHandlers():  # with a handler of ours, Python would no longer print warnings by itself
            to_terminal = logging.StreamHandler(sys.stderr)
            to_terminal.setLevel(logging.WARNING)
            to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            self._handlers.append(to_terminal)
        for handler in self._handlers:
            tandem.addHandler(handler)


def _take_lock(folder: Path) -> IO[str]:
    """The lock dies with its process, so a killed run leaves none behind."""
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "a process that has just started"
        lock.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise RunFolderInUse(
            f"{folder} is being written by another run: {holder}. Wait for it, stop it, or choose another trial_name."
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    lock.flush()
    return lock


def refuse_existing(folder: Path) -> None:
    """Raises `RunFolderTaken` where the folder holds a run; says what of it, and how to proceed.

    A run that failed before its first step left nothing worth keeping: its folder may be used again.
    """
    found = existing_run(folder)
    if found is not None and not (found.status == "failed" and found.steps == 0 and not found.checkpoints):
        raise RunFolderTaken(
            f"{folder} holds a run: {found.describe()}. A run is never overwritten: choose another name with trial_name=…, "
            "or move that folder away. (Resuming a run is not in this version.)"
        )
