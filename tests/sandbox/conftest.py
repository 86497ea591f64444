"""A sandbox of each back end that works here."""

import pytest

from tandem.config.errors import ConfigError
from tandem.sandbox.choose import choose_sandbox


@pytest.fixture(scope="module", params=["bubblewrap", "landlock", "none"])
def sandbox(request):
    """Each back end in turn, with one worker, so that every program follows the one before it."""
    try:
        made = choose_sandbox(request.param, size=1)
    except ConfigError as error:
        pytest.skip(f"{request.param} does not work here: {str(error).splitlines()[1]}")
    yield made
    made.close()
