"""Pictures and sounds of a run: recorded by number, shown as small copies, and missing without harm."""

import base64
import io
import wave

import numpy as np
import pytest
from PIL import Image

from tandem.media import store
from tandem.media.parts import read_media
from tests.tracking.test_recorder import group, record, sample
from tests.view.runs import make_run, questions


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The samples of a group whose prompt has a picture twice and a sound."""
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))
    picture = np.random.default_rng(0).integers(0, 256, (300, 800, 3), dtype=np.uint8)
    tone = {"array": np.sin(np.arange(8000) / 9).astype(np.float32), "sampling_rate": 8000}
    parts = [{"type": "image", "image": picture}, {"type": "audio", "audio": tone}, {"type": "image", "image": picture}]
    messages = read_media([{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}])
    run = make_run(tmp_path / "runs/sums/one", steps=1)
    record(run, 2, [group(7, *(sample(reward, messages=tuple(messages)) for reward in (1.0, 0.5)))])
    return lambda: questions(tmp_path).ask("group", {"run": "sums/one", "step": 2, "group": 7})


def test_a_group_shows_each_medium_once_and_small(shown):
    first, second = (one["media"] for one in shown())
    assert [one["kind"] for one in first if "url" in one] == ["image", "audio"] and len(first) == 3
    assert not any("url" in one for one in second), "the samples of a group share theirs"
    image, sound = (base64.b64decode(one["url"].partition(",")[2]) for one in first if "url" in one)
    assert Image.open(io.BytesIO(image)).size == (384, 144)
    with wave.open(io.BytesIO(sound)) as played:
        assert (played.getframerate(), played.getnframes()) == (store.RATE, 16000)


def test_a_medium_that_is_gone_is_named_and_hides_nothing(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "emptied"))
    best, _ = shown()
    assert best["reward"] == 1.0 and all("TANDEM_MEDIA" in one["missing"] for one in best["media"][:2])
