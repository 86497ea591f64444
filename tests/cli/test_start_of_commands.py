"""How a command is imported."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from tandem.cli.main import import_object


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("ends", ["", "1 / 0"])
def test_an_import_is_not_searched_for_garbage_and_collection_is_then_as_before(tmp_path, monkeypatch, enabled, ends):
    name = f"imported_{enabled}_{bool(ends)}"
    (tmp_path / f"{name}.py").write_text(f"import gc, sys\nsys.searched = gc.isenabled()\nFOUND = 5\n{ends}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.searched", None, raising=False)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        if ends:
            with pytest.raises(ZeroDivisionError):
                import_object(f"{name}:FOUND")
        else:
            assert import_object(f"{name}:FOUND") == 5
        assert sys.searched is False and gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_imported_already_is_returned_without_a_walk_over_all_objects(monkeypatch):
    monkeypatch.setattr("gc.get_freeze_count", lambda: pytest.fail("the count walks over all frozen objects"))
    assert import_object("tandem.cli.main:import_object") is import_object


@pytest.mark.parametrize("library", ["psutil", "torch"])  # every command imports the first; this one runs, and imports both
def test_ctrl_c_during_an_import_ends_in_one_line(tmp_path, library):
    cut_off = "except BaseException as error:\n    raise ImportError('cut off') from error\n"  # as extensions in C do
    (tmp_path / f"{library}.py").write_text(
        f"import time\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\n{cut_off}"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", "plan", "train_dataset.path=addition"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "\nInterrupted.\n")
    assert process.returncode == 130
