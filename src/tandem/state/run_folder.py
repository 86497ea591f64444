"""The folder of a run: its lock, its record `run.json`, its log, and the paths of its files."""

import errno
import fcntl
import itertools
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from tandem.api.shared_files import write_atomically
from tandem.config.arithmetic import run_path
from tandem.config.errors import ConfigError, kind_and_text
from tandem.state.existing import last_metrics, refuse_held, run_info, take_lock, times_resumed
from tandem.state.machine import git_commit, machine, now, versions
from tandem.state.resuming import Examine, Going, refuse_existing

Status = Literal["finished", "interrupted", "failed"]
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EISDIR, errno.ENOTDIR}

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RunFolder:
    """The folder `<root>/<experiment>/<trial>/`, locked by this process until `close`; a context manager.

    Leaving the ``with`` block records how the run ended: finished, interrupted (Ctrl-C), or failed with the error.

    Example::

        with RunFolder.open("runs", "gsm8k", "first", config_text="seed: 1\\n", seed=1) as run:
            (run.path / "notes.txt").write_text("…")
    """

    def __init__(self, path: Path, lock: IO[str], info: dict[str, Any], going: Going | None = None):
        self.path = path
        self.info = info
        self.going = going
        """The earlier run in this folder that is resumed; None for a new run."""

        self.failed_saves = 0
        """Number of checkpoints that could not be saved while training continued."""

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
        """Creates the folder, takes its lock, writes `config.yaml` and `run.json`, and starts logging to `log.txt`.

        If a run is resumed, `config.yaml` is not changed until `begin`, because the new configuration may still be refused.
        ``command``: name of the command, for `run.json`. ``examine``: decides whether an existing run is resumed; by default
        it is refused.

        Raises:
            RunFolderInUse: another process holds the lock; the message names it.
            RunFolderTaken: the folder holds a run; the message describes the run and says how to proceed.
            ConfigError: a name is not valid, the root is not writable, or ``examine`` refuses.
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
            elif "restarts" in (before := run_info(path)):  # a run that failed before its first step is started again
                info |= {key: before[key] for key in ("id", "restarts") if key in before}  # its servers know the id
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
    def check(root: str | Path, path: Path, examine: Examine) -> None:
        """Checks that `open` could open the run folder ``path`` below ``root``; writes nothing.

        Raises:
            ConfigError: see `open`.
        """
        refuse_unwritable(root, path)
        refuse_held(path)
        examine(path)

    @property
    def id(self) -> str:
        """The run's unique id, which differs even from that of a run with the same experiment and trial elsewhere."""
        return str(self.info["id"])

    def begin(self, step: int = 0) -> None:
        """Records that the run starts with its new configuration, after ``step``; call it after models are built and the
        checkpoint is read. Idempotent."""
        if self._pending_config is not None:
            if self.going is not None:
                self.info["resumed"][-1]["from"] = step
                self._write_info()
            write_atomically(self.path / "config.yaml", self._pending_config)
            self._pending_config = None

    def adopt(self, name: str) -> None:
        """Restores the run's id from a checkpoint, if `run.json` was lost."""
        self.info["id"] = name
        self._write_info()

    def remember(self, name: str, value: str) -> str:
        """Stores a fact about the run in `run.json` unless it is there already; returns the stored value."""
        if name not in self.info:
            self.info[name] = value
            self._write_info()
        return str(self.info[name])

    def restarted(self, number: int, cause: str) -> None:
        """Records in `run.json` that this process continues the run after a failure."""
        self.info["restarts"] = [*self.info.get("restarts", []), {"at": now(), "cause": cause, "number": number}]
        self._write_info()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints `step_N/`; it may not exist yet."""
        return self.path / "checkpoints"

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """Records how the run ended and closes the folder; only the first call has an effect."""
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
        """Stops logging to the folder and releases the lock; a run that is closed without `finish` counts as killed."""
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
        except OSError as failure:  # the disk may have ended the run; the run's own error is more important
            print(f"run.json could not be written: {failure}", file=sys.stderr)
        finally:
            self.close()

    def _take_back(self) -> None:
        """Restores the run's record as it was before a resumption that was refused."""
        lost = self.info["resumed"][-1].get("lost")
        if lost:
            os.replace(self.path / lost, self.path / "metrics.jsonl")
        if self._info_before:
            self.info = self._info_before
            self._write_info()

    def _write_info(self) -> None:
        _write_record(self.path, self.info)

    def _start_logging(self) -> None:
        """Logs `tandem.*` from level INFO to log.txt, and warnings to the terminal unless the script configured logging."""
        tandem = logging.getLogger("tandem")
        tandem.setLevel(min(tandem.level or logging.INFO, logging.INFO))
        to_file = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        to_file.setFormatter(logging.Formatter(LOG_FORMAT))
        self._handlers = [to_file]
        if not tandem.hasHandlers():  # with a file handler, Python no longer prints warnings itself
            to_terminal = logging.StreamHandler(sys.stderr)
            to_terminal.setLevel(logging.WARNING)
            to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            self._handlers.append(to_terminal)
        for handler in self._handlers:
            tandem.addHandler(handler)


def _write_record(folder: Path, info: Mapping[str, Any]) -> None:
    write_atomically(folder / "run.json", json.dumps(info, indent=2, ensure_ascii=False) + "\n")


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
    """Returns ``info`` for a resumed run: with its old id and start, and a new entry under ``resumed``.

    Without a checkpoint the run begins anew, and the file of its lost metrics is renamed.
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


def refuse_unwritable(root: str | Path, path: Path) -> None:
    """Checks that the folder is writable or can be created.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    try:
        require_writable(path)
    except OSError as error:
        raise _unwritable(root, path, error) from error


def require_writable(folder: Path) -> None:
    """Checks that a folder is writable or can be created; raises `OSError` if not."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _unwritable(root: str | Path, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.root={root} cannot hold the run folder {path}: {error.strerror or error}")


STACKS = "stacks-{number}.txt"


def stacks_file(folder: Path) -> Path:
    """Returns the first unused path for a file of stack traces in the folder."""
    return next(p for n in itertools.count(1) if not (p := folder / STACKS.format(number=n)).exists())


def record_failure(
    folder: Path, cause: str, *, keep: bool = False, stacks: str = "", restart: Mapping[str, Any] | None = None
) -> Path | None:
    """Records in `run.json` and `log.txt` that and why the run failed; returns the path of the written ``stacks``, or None.

    ``keep``: keep an error that the run recorded itself, which is more precise. ``restart``: the entry for the restart that
    follows.

    Raises:
        RunFolderInUse: another run holds the folder.
        OSError: writing failed.
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
        _write_record(folder, info | where)
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            then = f"; restart {restart['number']} follows" if restart is not None else ""
            log.write(f"{now()} ERROR tandem.supervision: {cause}{then}{f' (see {path.name})' if path else ''}\n")
    return path
