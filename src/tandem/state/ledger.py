"""The ledger of a run on disk: which prompts were trained or dropped at which step. It is an SQLite file, so a kill leaves
it intact.

It is append-only, with one exception: when a run is resumed, records after the checkpoint are removed, because the weights
that were trained on them are lost.
"""

import contextlib
import hashlib
import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.api.failures import NotWritten
from tandem.config.errors import TandemError

FILE = "ledger.sqlite"
FORMAT = 1

NOT_WRITTEN = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_TRUNCATE")
"""Names of SQLite's errors for a disk that cannot be written."""

REMEDY = (
    "so it is not known which prompts are left; the weights are unchanged. Restore that file, or begin another run from the "
    "weights of a checkpoint: trial_name=… actor.path=FOLDER"
)

Record = tuple[int, int, bool, str]
"""(epoch, index of the row, True if it was trained, reason if it was dropped)"""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS commits (number INTEGER PRIMARY KEY, step INTEGER NOT NULL, records INTEGER NOT NULL, "
    "digest TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS prompts (epoch INTEGER, place INTEGER, trained INTEGER NOT NULL, reason TEXT NOT NULL, "
    "number INTEGER NOT NULL, PRIMARY KEY (epoch, place)) WITHOUT ROWID",
)


class LedgerDamaged(TandemError, ValueError):
    """The file is missing, is not a ledger, or does not match the checkpoint."""


class LedgerNotWritten(NotWritten):
    """Writing failed; the ledger is unchanged."""


class LedgerFile:
    """The ledger of one run; a context manager. Steps of successive commits never decrease, except after `roll_back`.

    The SHA-256 of each commit includes that of the commit before, so the last digest stands for the whole ledger.
    """

    def __init__(self, path: Path):
        """Opens the file, or creates it. Raises `LedgerDamaged` if it is not a ledger."""
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
            self._db.execute("PRAGMA synchronous=FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise LedgerDamaged(f"{path} has format {version}, and this version reads format {FORMAT}")
            with self._db:
                for table in _TABLES:
                    self._db.execute(table)
                self._db.execute(f"PRAGMA user_version={FORMAT}")
            self.number, self.records, self.digest = self._last()
        except sqlite3.Error as error:
            raise LedgerDamaged(f"{path} cannot be opened as a ledger ({error}), {REMEDY}") from error

    def commit(self, step: int, records: Sequence[Record]) -> None:
        """Adds, in one transaction, the prompts that ended up to the end of ``step``. Does nothing without records.

        Raises:
            LedgerDamaged: a prompt has ended before; each prompt of an epoch ends once.
            LedgerNotWritten: writing failed.
        """
        if not records:
            return
        number, digest = self.number + 1, _chained(self.digest, records)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                rows = ((epoch, place, int(trained), reason, number) for epoch, place, trained, reason in records)
                self._db.executemany("INSERT INTO prompts VALUES (?, ?, ?, ?, ?)", rows)
                self._db.execute(
                    "INSERT INTO commits VALUES (?, ?, ?, ?)", (number, step, self.records + len(records), digest)
                )
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # on a full disk, the next opening rolls back
                        self._db.execute("ROLLBACK")
                raise
        except sqlite3.IntegrityError as error:
            raise LedgerDamaged(
                f"{self.path}: a prompt that has ended before ended again at step {step}; each prompt of an epoch is "
                f"trained once, or dropped with a reason ({error})"
            ) from error
        except sqlite3.Error as error:
            raise LedgerNotWritten(
                f"the outcomes of the prompts of step {step} could not be written to {self.path}: {error}. The step does "
                "not count, and the checkpoints are unchanged: free some space there, or make it writable, and repeat the "
                "command"
            ) from error
        self.number, self.records, self.digest = number, self.records + len(records), digest

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Turns SQLite's errors in the block into `LedgerNotWritten` or `LedgerDamaged`."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorname", "").startswith(NOT_WRITTEN):
                raise LedgerNotWritten(f"{self.path} could not be written: {error}; free some space there") from error
            raise LedgerDamaged(f"{self.path} cannot be read ({error}), {REMEDY}") from error

    def roll_back(self, step: int) -> int:
        """Removes what was committed after ``step``; returns the number of removed prompts.

        Raises:
            LedgerDamaged: the file cannot be read.
            LedgerNotWritten: writing failed.
        """
        before = self.records
        with self._readable():
            (number,) = self._db.execute("SELECT COALESCE(MAX(number), 0) FROM commits WHERE step <= ?", (step,)).fetchone()
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM prompts WHERE number > ?", (number,))
            self._db.execute("DELETE FROM commits WHERE number > ?", (number,))
            self._db.execute("COMMIT")
            self.number, self.records, self.digest = self._last()
        return before - self.records

    def verify(self, records: int, digest: str) -> None:
        """Checks, record by record, that the ledger matches the number of records and the digest in a checkpoint.

        Raises:
            LedgerDamaged: it is another ledger, or was changed.
        """
        if (self.records, self.digest) != (records, digest):
            raise LedgerDamaged(
                f"{self.path} has {self.records} prompts (digest {self.digest[:12]}…), and the checkpoint was saved with "
                f"{records} ({digest[:12]}…), {REMEDY}"
            )
        chain, counted = "", 0
        with self._readable():
            for commit, batch in self._commits():
                chain, counted = _chained(chain, batch), counted + len(batch)
                if chain != commit:
                    raise LedgerDamaged(
                        f"{self.path} was changed: its prompts do not give the digest {commit[:12]}…, {REMEDY}"
                    )
        if counted != records or chain != digest:
            raise LedgerDamaged(f"{self.path} was changed: {counted} prompts instead of {records}, {REMEDY}")

    def ended(self) -> Iterator[Record]:
        """Yields every prompt that has ended, in the order of commits."""
        with self._readable():
            for epoch, place, trained, reason in self._db.execute(
                "SELECT epoch, place, trained, reason FROM prompts ORDER BY number, epoch, place"
            ):
                yield epoch, place, bool(trained), reason

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> "LedgerFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last(self) -> tuple[int, int, str]:
        row = self._db.execute("SELECT number, records, digest FROM commits ORDER BY number DESC LIMIT 1").fetchone()
        return row or (0, 0, "")

    def _commits(self) -> Iterator[tuple[str, list[Record]]]:
        """Yields (digest, prompts) of each commit in order, from one query that is grouped as it is read."""
        digests = dict(self._db.execute("SELECT number, digest FROM commits ORDER BY number"))
        rows = self._db.execute("SELECT number, epoch, place, trained, reason FROM prompts ORDER BY number, epoch, place")
        for number, batch in itertools.groupby(rows, key=lambda row: row[0]):
            yield (
                digests.get(number, ""),
                [(epoch, place, bool(trained), reason) for _, epoch, place, trained, reason in batch],
            )


def _chained(before: str, records: Sequence[Record]) -> str:
    """Returns the SHA-256 over the previous digest and the prompts, sorted by epoch and index."""
    lines = "".join(f"{epoch} {place} {int(trained)} {reason}\n" for epoch, place, trained, reason in sorted(records))
    return hashlib.sha256(f"{before}\n{lines}".encode()).hexdigest()
