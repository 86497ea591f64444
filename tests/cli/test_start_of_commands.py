"""How a command is imported."""

import gc
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
