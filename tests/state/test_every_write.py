"""Whatever write, rename or flush of a save is the last, the checkpoint before it or the new one is there, whole."""

import shutil
import signal

import pytest

from tests.state.saving import whole
from tests.zygote import Zygote


@pytest.fixture(scope="module")
def zygote():
    with Zygote("tests.state.saving") as zygote:
        yield zygote


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("beside", [False, True], ids=["waited for", "beside training"])
def test_a_save_may_be_killed_at_each_of_its_writes(zygote, tmp_path, beside):
    def save(root, step, nth):
        return zygote.call("tests.state.saving:save", [str(root), step, nth, beside], tmp_path / "log")

    base = tmp_path / "base"
    assert save(base, 1, 0) == 0, (tmp_path / "log").read_text()
    count = tmp_path / "count"
    shutil.copytree(base, count)
    assert save(count, 2, 0) == 0
    events = int((count / "events").read_text())
    assert events >= 20 and whole(count).step == 2

    survived = []
    for nth in range(1, events + 1):
        root = tmp_path / f"killed-{nth}"
        shutil.copytree(base, root)
        assert save(root, 2, nth) == -signal.SIGKILL, f"event {nth}: {(tmp_path / 'log').read_text()}"
        survived.append(whole(root).step)
        assert save(root, 2 + (survived[-1] == 2), 0) == 0, (tmp_path / "log").read_text()
        names = sorted(path.name for path in (root / "exp/trial/checkpoints").iterdir())
        assert names == [f"step_{whole(root).step}"]  # and the next save leaves nothing of it behind
        shutil.rmtree(root)
    assert survived == sorted(survived) and set(survived) == {
        1,
        2,
    }  # until the rename the old one, from there on the new one
