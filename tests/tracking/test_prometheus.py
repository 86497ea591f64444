"""The sink for Prometheus: what its own parser reads from the page, the port, and the end."""

import math
import socket
import urllib.request
from urllib.error import URLError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrackingConfig
from tandem.tracking.catalog import METRICS
from tandem.tracking.tracker import Tracker


@pytest.fixture
def served(tmp_path, capsys):
    """A run that has logged a step, and the address that it announced."""
    config = TrackingConfig(sinks=("prometheus(port=0)",), plot_every_steps=None)
    with Tracker(tmp_path, config, run_name='exp/"odd"\nname', progress=False) as tracker:
        address = capsys.readouterr().out.removeprefix("Prometheus: ").strip()
        tracker.log(7, {"reward/mean": 0.5, "rewards/a-b": 1.0, "rewards/a_b": 2.0, "gap/max": math.nan, "mine/größe": 3e9})
        yield tracker, address


def families(address):
    with urllib.request.urlopen(address, timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_the_page_has_each_metric_of_the_last_step_with_its_help(served):
    tracker, address = served
    tracker.log(8, {"reward/mean": 0.75})

    found = families(address)
    (sample,) = found["tandem_reward_mean"].samples
    assert sample.value == 0.75 and sample.labels == {"run": 'exp/"odd"\nname', "metric": "reward/mean"}
    assert METRICS["reward/mean"].meaning in found["tandem_reward_mean"].documentation
    assert found["tandem_step"].samples[0].value == 8 and "tandem_rewards_a_b" not in found


def test_names_that_become_one_are_told_apart(served):
    values = {sample.labels["metric"]: sample.value for sample in families(served[1])["tandem_rewards_a_b"].samples}
    assert values == {"rewards/a-b": 1.0, "rewards/a_b": 2.0}


def test_any_name_and_number_can_be_read(served):
    found = families(served[1])
    assert math.isnan(found["tandem_gap_max"].samples[0].value) and found["tandem_mine_gr__e"].samples[0].value == 3e9


def test_the_endpoint_is_for_this_machine_and_closes_with_the_run(served):
    tracker, address = served
    assert address.startswith("http://127.0.0.1:")
    tracker.close()
    with pytest.raises(URLError):
        families(address)


def test_a_port_that_is_taken_is_refused_with_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        sink = f"prometheus(port={other.getsockname()[1]})"
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*port=0 for any free port"):
            Tracker(tmp_path, TrackingConfig(sinks=(sink,)), progress=False)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ("port=99999", r"port=99999\): port must be 1 to 65535"),
        ("port=-1", r"port=-1\): port must be 1 to 65535"),
        ("port=9100.5", "port must be a whole number, got 9100.5"),
        ("host=nowhere.invalid", r"cannot listen on nowhere\.invalid:9100: .* host is an address of this machine"),
        (f"host={'x' * 300}", "cannot listen on x+:9100: .* host is an address of this machine"),
        ("host=''", "cannot listen on '':9100: .* host is an address of this machine"),
        ("host=[1]", r"host must be text, got \[1\]"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_remedy(tmp_path, knobs, words):
    with pytest.raises(ConfigError, match=words):
        Tracker(tmp_path, TrackingConfig(sinks=(f"prometheus({knobs})",)), progress=False)


def test_the_address_of_a_host_with_colons_can_be_opened(tmp_path, capsys):
    with Tracker(tmp_path, TrackingConfig(sinks=("prometheus(host=::1, port=0)",)), progress=False) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        assert "tandem_reward_mean" in families(capsys.readouterr().out.removeprefix("Prometheus: ").strip())
