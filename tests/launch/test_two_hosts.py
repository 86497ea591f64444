"""One run over two hosts, which are network namespaces of this machine: see `scripts/two_hosts.py`."""

import pytest

from scripts.two_hosts import CASES, opened, run_case, why_not


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    with opened(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_run_over_two_hosts_ends_as_on_one_whatever_happens_to_the_cable(case, name, capsys):
    failures = run_case(case, name)
    assert failures == 0, capsys.readouterr().out
