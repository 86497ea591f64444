import pytest


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A media store of the test's own."""
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media_store"))
    return tmp_path / "media_store"
