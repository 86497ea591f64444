"""The durable ledger: each prompt of an epoch ends once, a kill tears nothing, and what was lost is taken back."""

import sqlite3
import time

import pytest

from tandem.state.ledger import LedgerDamaged, LedgerFile


def records(start, count, epoch=0):
    return [(epoch, i, i % 3 > 0, "" if i % 3 else "too_hard") for i in range(start, start + count)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def test_what_was_committed_is_there_after_the_process_and_says_so(path):
    with LedgerFile(path) as file:
        file.commit(1, records(0, 4)[::-1])  # in whatever order they ended
        file.commit(2, records(4, 4))
        stated = file.records, file.digest
    with LedgerFile(path) as file:
        assert (file.records, file.digest) == stated and file.records == 8
        file.verify(*stated)
        assert list(file.ended()) == records(0, 8)


def test_a_prompt_ends_once(path):
    with LedgerFile(path) as file:
        file.commit(1, records(0, 4))
        with pytest.raises(LedgerDamaged, match="each prompt of an epoch is trained once"):
            file.commit(2, [*records(4, 2), (0, 3, True, "")])
        assert file.records == 4 and list(file.ended()) == records(0, 4)  # all of a commit, or nothing
        file.commit(2, records(4, 2))
        file.commit(3, records(0, 2, epoch=1))  # in another epoch again


def test_what_later_steps_did_is_taken_back_and_the_digest_with_it(path):
    with LedgerFile(path) as file, LedgerFile(path.with_name("short.sqlite")) as short:
        for step in (1, 2, 3):
            file.commit(step, records(4 * step, 4))
        for step in (1, 2):
            short.commit(step, records(4 * step, 4))
        assert file.roll_back(2) == 4
        assert (file.records, file.digest) == (short.records, short.digest)
        file.verify(short.records, short.digest)
        file.commit(3, records(12, 4))  # and they end again
        assert file.roll_back(0) == 12 and list(file.ended()) == []
        file.verify(0, "")


def test_an_empty_commit_is_none(path):
    with LedgerFile(path) as file:
        file.commit(1, [])
        assert (file.number, file.digest) == (0, "")


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE prompts SET trained = 1 - trained WHERE place = 2",
        "DELETE FROM prompts WHERE place = 1",
        "INSERT INTO prompts VALUES (0, 77, 1, '', 1)",
        "UPDATE commits SET digest = 'x' WHERE number = 1",
        "DELETE FROM commits WHERE number = 1",
        "DELETE FROM commits WHERE number = 2",
    ],
)
def test_a_ledger_that_was_changed_is_found_out(path, harm):
    with LedgerFile(path) as file:
        file.commit(1, records(0, 4))
        file.commit(2, records(4, 4))
        stated = file.records, file.digest
    with sqlite3.connect(path) as db:
        db.execute(harm)
    db.close()
    with LedgerFile(path) as file, pytest.raises(LedgerDamaged, match=r"it is not known which prompts are left|was changed"):
        file.verify(*stated)


def test_damage_that_is_met_on_the_way_is_named(path):
    with LedgerFile(path) as ledger:
        for step in range(1, 40):
            ledger.commit(step, records(100 * step, 60))
        stated = ledger.records, ledger.digest
    data = bytearray(path.read_bytes())
    data[4096 * 3 :] = b"\xff" * len(data[4096 * 3 :])
    path.write_bytes(data)

    def read_again():
        with LedgerFile(path) as file:
            file.roll_back(20)
            file.verify(*stated)

    with pytest.raises(LedgerDamaged, match=r"ledger\.sqlite"):
        read_again()


def use(path, stated):
    with LedgerFile(path) as file:
        file.roll_back(20)
        file.verify(*stated)
        list(file.ended())


@pytest.mark.parametrize("harm", ["text", "folder", "cut", "cut to a page", "empty"])
def test_whatever_became_of_a_ledger_is_told_with_the_loss_and_the_remedy(path, harm):
    with LedgerFile(path) as file:
        for step in range(1, 21):
            file.commit(step, records(100 * step, 60))
        stated = file.records, file.digest
    data = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    else:
        path.write_bytes(
            {"text": b"no database" * 100, "cut": data[:-5000], "cut to a page": data[:4096], "empty": b""}[harm]
        )
    with pytest.raises(
        LedgerDamaged, match=r"it is not known which prompts are left.*Restore that file.*actor\.path="
    ) as found:
        use(path, stated)
    assert str(path) in str(found.value)


def test_a_ledger_of_another_format_is_named(path):
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=9")
    db.close()
    with pytest.raises(LedgerDamaged, match="has format 9, and this version reads format 1"):
        LedgerFile(path)


@pytest.mark.slow
def test_a_record_costs_less_than_a_tenth_of_a_millisecond_at_a_million(path):
    with LedgerFile(path) as file:
        for step in range(99):
            file.commit(step, records(10_000 * step, 10_000))
        began = time.perf_counter()
        for step in range(100, 140):  # as a run does: one commit a step, 256 prompts each
            file.commit(step, records(990_000 + 256 * (step - 100), 256))
        took = time.perf_counter() - began
        assert file.records > 1_000_000
    assert took / (40 * 256) < 1e-4
