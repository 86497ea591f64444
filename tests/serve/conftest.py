"""One tiny model, and servers of it."""

import pytest

from tests.serve.served import TOKEN, Served, tiny_engine
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder):
    with Served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(folder, tmp_path_factory):
    """With tokens, small bounds, and a folder that weights may come from."""
    root = tmp_path_factory.mktemp("root")
    limits = {"max_completions": 4, "max_body_bytes": 20_000, "max_weights_body_bytes": 50_000, "body_timeout_s": 0.4}
    with Served(
        folder, token=TOKEN, run="mine", roots=[root], idle_timeout_s=0.6, default_chat_tokens=8, **limits
    ) as server:
        server.root = root
        yield server


@pytest.fixture(scope="module")
def local(folder):
    engine = tiny_engine(folder)
    yield engine
    engine.close()
