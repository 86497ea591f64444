"""Every test of this folder that takes ``kind`` runs with both makers."""

import pytest

from tests.engines_inference.remote.clients import KINDS
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]
