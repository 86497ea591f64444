"""The folder of a run: who holds it, what it says of itself, where its files are."""

import errno
import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from tandem.api.lines import write_atomically
from tandem.config.errors import ConfigError, kind_and_text
from tandem.state.existing import is_held, last_metrics, run_info, times_resumed
from tandem.state.machine import git_commit, machine, versions
from tandem.state.resuming import Examine, Going, RunFolderTaken, refuse_existing

_ALLOWED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_LENGTH = 100


def check_name(key: str, name: str) -> str:
    """Returns the name if it can be one folder's name.

    Raises:
        ConfigError: names the key, the value and the rule.
    """
    if not isinstance(name, str) or not _ALLOWED.fullmatch(name) or len(name) > MAX_LENGTH:
        raise ConfigError(
            f"{key} must be the name of one folder: letters, digits, '.', '_' and '-', not starting with '.' or '-', "
            f"at most {MAX_LENGTH} characters; got {name!r}"
        )
    return name


__all__ = ["RunFolder", "RunFolderInUse", "RunFolderTaken", "refuse_existing", "run_path", "write_atomically"]

Status = Literal["finished", "interrupted", "failed"]
LOOKED_AT_S = 0.3
"""Seconds for which somebody who only looks may hold the lock."""

IN_USE = "{folder} is being written by another run: {who}. Wait for it, stop it, or choose another trial_name."

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EISDIR, errno.ENOTDIR}

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RunFolderInUse(ConfigError):
    """Another process is writing to the folder."""


def now() -> str:
    """The time to the second, with its offset, such as 2030-05-01T09:30:00+00:00."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime())


def run_path(root: str | Path, experiment: str, trial: str) -> Path:
    """`<root>/<experiment>/<trial>`, the names checked."""
    parts = check_name("experiment_name", experiment), check_name("trial_name", trial)
    try:
        return Path(root).expanduser().joinpath(*parts)
    except RuntimeError as error:
        raise ConfigError(f"run.root={root} begins with the home folder of an unknown user: {error}") from error


class RunFolder:
    """`<root>/<experiment>/<trial>/`, held by this process until `close`; a context manager.

    Leaving the ``with`` block says how the run ended: finished, interrupted (Ctrl-C) or failed with the error.

    Example::

        with RunFolder.open("runs", "gsm8k", "first", config_text="seed: 1\\n", seed=1) as run:
            (run.path / "notes.txt").write_text("…")
    """

    def __init__(self, path: Path, lock: IO[str], info: dict[str, Any], going: Going | None = None):
        self.path = path
        self.info = info
        self.going = going
        """The run that was here before and goes on; None in a new one."""

        self.failed_saves = 0
        """Checkpoints that the disk refused, where training goes on all the same."""

        self._info_before = run_info(path) if going is not None else {}
        self._pending_config: str | None = None
        self._lock: IO[str] | None = lock
        self._began = time.monotonic()
        self._handlers: list[logging.Handler] = []

    @classmethod
    def open(
        cls,
        root: str | Path,
        experiment: str,
        trial: str,
        *,
        config_text: str,
        seed: int | None = None,
        command: str | None = None,
        examine: Examine = refuse_existing,
    ) -> Self:
        """Makes the folder, takes its lock and writes `config.yaml` and `run.json`; logs go to `log.txt` from here on.

        Where a run goes on, `config.yaml` stays what it was until `begin`: what is refused on the way must not be in it.

        ``command``: the name of the one that made it. ``examine``: says whether a run that is there goes on; none does
        unless it is given.

        Raises:
            RunFolderInUse: another process holds it; says which.
            RunFolderTaken: a run is there; says what of it, and how to proceed.
            ConfigError: a name that is not a folder's, a root that cannot be written, or what ``examine`` refuses.
        """
        path = run_path(root, experiment, trial)
        refuse_unwritable(root, path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path)
        except OSError as error:
            raise _unwritable(root, path, error) from error
        try:
            going = examine(path)
            info = _info(experiment, trial, seed, command)
            if going is not None:
                info = _continued(path, info, going)
            elif "restarts" in (before := run_info(path)):  # it failed before its first step, and is started again
                info |= {key: before[key] for key in ("id", "restarts") if key in before}  # its servers know the name
            run = cls(path, lock, info, going)
            run._pending_config = config_text
            if going is None:
                run.begin()
            run._write_info()
            run._start_logging()
        except BaseException as error:
            lock.close()
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                words = "free some space there, make it writable, or give another run.root"
                raise ConfigError(f"the run folder {path} cannot be written: {error}; {words}") from error
            raise
        return run

    @staticmethod
    def check(root: str | Path, experiment: str, trial: str, examine: Examine) -> None:
        """Passes if `open` would take the folder; writes nothing.

        Raises:
            ConfigError: as `open`.
        """
        path = run_path(root, experiment, trial)
        refuse_unwritable(root, path)
        if is_held(path):
            raise _in_use(path, (path / ".lock").read_text(encoding="utf-8"))
        examine(path)

    @property
    def id(self) -> str:
        """The run's own name: no other run has it, also one of the same experiment and trial elsewhere."""
        return str(self.info["id"])

    def begin(self, step: int = 0) -> None:
        """The run really starts with its new configuration, after ``step``: models are built and the checkpoint is read.
        Idempotent."""
        if self._pending_config is not None:
            if self.going is not None:
                self.info["resumed"][-1]["from"] = step
                self._write_info()
            write_atomically(self.path / "config.yaml", self._pending_config)
            self._pending_config = None

    def adopt(self, name: str) -> None:
        """Takes back the run's own name from a checkpoint, where `run.json` was lost."""
        self.info["id"] = name
        self._write_info()

    def remember(self, name: str, value: str) -> str:
        """Writes a fact about the run into `run.json`, unless an earlier time has written it; the first one's value."""
        if name not in self.info:
            self.info[name] = value
            self._write_info()
        return str(self.info[name])

    def restarted(self, number: int, cause: str) -> None:
        """Writes down that this process goes on with the run after a failure."""
        self.info["restarts"] = [*self.info.get("restarts", []), {"at": now(), "cause": cause, "number": number}]
        self._write_info()

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
            self.info["error"] = error if isinstance(error, str) else kind_and_text(error)
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
            return
        refused = isinstance(error, ConfigError) and self.going is not None and self._pending_config is not None
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        try:
            if not interrupted:
                logging.getLogger("tandem.state").info(
                    "the run was refused" if refused else "the run failed", exc_info=error
                )
            if refused:
                self._take_back()
            else:
                self.finish("interrupted" if interrupted else "failed", None if interrupted else error)
        except OSError as failure:  # the disk that ended the run takes no last words either: the error itself matters more
            print(f"run.json could not be written: {failure}", file=sys.stderr)
        finally:
            self.close()

    def _take_back(self) -> None:
        """Makes the run what it was before it was to go on: nothing has been trained since."""
        lost = self.info["resumed"][-1].get("lost")
        if lost:
            os.replace(self.path / lost, self.path / "metrics.jsonl")
        if self._info_before:
            self.info = self._info_before
            self._write_info()

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


def _info(experiment: str, trial: str, seed: int | None, command: str | None) -> dict[str, Any]:
    return {
        "id": f"{experiment}/{trial}/{secrets.token_hex(4)}",
        "experiment": experiment,
        "trial": trial,
        "command": command,
        "status": "running",
        "started": now(),
        "seed": seed,
        "versions": versions(),
        "git": git_commit(),
        "machine": machine(),
    }


def _continued(folder: Path, info: dict[str, Any], going: Going) -> dict[str, Any]:
    """``info`` of a run that goes on: with its old name and start, and one more line under ``resumed``.

    Without a checkpoint it begins anew, and the metrics of what is lost are set aside.
    """
    before, run = run_info(folder), going.found
    line = {"at": now(), "was": run.status, "steps": run.steps, "changed": [str(d) for d in going.changed]}
    was, now_ = before.get("versions") or {}, info["versions"]
    line["versions"] = {name: f"{was[name]} → {now_[name]}" for name in was if now_.get(name, was[name]) != was[name]}
    line["before"] = [{"path": d.path} | ({} if d.added else {"value": d.before}) for d in going.changed]
    if not run.checkpoints and (folder / "metrics.jsonl").is_file():
        aside = next(p for n in itertools.count(1) if not (p := folder / f"metrics.lost-{n}.jsonl").exists())
        os.rename(folder / "metrics.jsonl", aside)
        line["lost"] = aside.name
    facts = ("id", "started", "restarts", *(("kernels", "training_kernels") if run.checkpoints else ()))
    same = {name: before[name] for name in facts if name in before}
    return info | same | {"resumed": [*times_resumed(folder), line]}


def _flock(lock: IO[str]) -> None:
    """Takes the lock; waits a moment, for `existing.is_held` holds it while it looks. Raises `OSError`."""
    until = time.monotonic() + LOOKED_AT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def refuse_unwritable(root: str | Path, path: Path) -> None:
    """Passes if the folder is there and can be written to, or can be made.

    Raises:
        ConfigError: it cannot; says why.
    """
    try:
        require_writable(path)
    except OSError as error:
        raise _unwritable(root, path, error) from error


def require_writable(folder: Path) -> None:
    """Passes if a folder is there and can be written to, or can be made; raises `OSError` as making it would."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _unwritable(root: str | Path, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.root={root} cannot hold the run folder {path}: {error.strerror or error}")


def _in_use(folder: Path, holder: str, told: str = IN_USE) -> RunFolderInUse:
    return RunFolderInUse(told.format(folder=folder, who=holder.strip() or "a process that has just started"))


def take_lock(folder: Path, told: str = IN_USE) -> IO[str]:
    """The lock of a folder, held until it is closed; it dies with its process, so a killed run leaves none behind.
    ``told``: what is said of a folder that is in use, with ``{folder}`` and ``{who}``.

    Raises:
        RunFolderInUse: another process holds it; says which.
    """
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        _flock(lock)
    except OSError as error:
        lock.seek(0)
        holder = lock.read()
        lock.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise _in_use(folder, holder, told) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    lock.flush()
    return lock


STACKS = "stacks-{number}.txt"


def stacks_file(folder: Path) -> Path:
    """The first free name for a file of stacks in the folder."""
    return next(p for n in itertools.count(1) if not (p := folder / STACKS.format(number=n)).exists())


def record_failure(
    folder: Path, cause: str, *, keep: bool = False, stacks: str = "", restart: Mapping[str, Any] | None = None
) -> Path | None:
    """Writes down in `run.json` and `log.txt` that the run failed and why; returns the file with ``stacks`` where there are.

    ``keep``: an error that the run has written itself says more. ``restart``: what is said of the restart that follows.

    Raises:
        RunFolderInUse: another run holds the folder.
        OSError: the disk refuses.
    """
    with take_lock(folder):
        info, path = run_info(folder), None
        if info.get("status") == "finished":
            return None
        if stacks:
            path = stacks_file(folder)
            path.write_text(stacks, encoding="utf-8")
        if not (keep and info.get("status") == "failed"):
            info |= {"status": "failed", "error": cause, "ended": now(), "steps": last_metrics(folder).get("step", 0)}
        where = {} if path is None else {"stacks": path.name}
        if restart is not None:
            line = {"at": now(), "cause": cause, **restart, **where}
            info["restarts"] = [*info.get("restarts", []), line]
        write_atomically(folder / "run.json", json.dumps(info | where, indent=2, ensure_ascii=False) + "\n")
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            then = f"; restart {restart['number']} follows" if restart is not None else ""
            log.write(f"{now()} ERROR tandem.supervision: {cause}{then}{f' (see {path.name})' if path else ''}\n")
    return path
