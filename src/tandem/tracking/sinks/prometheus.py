"""Prometheus: an HTTP endpoint with the metrics of the last step, on this machine alone unless ``host`` says otherwise."""

import re
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from tandem.config.errors import ConfigError
from tandem.tracking.catalog import explain
from tandem.tracking.sinks.base import SinkRun

LABELS = ("run", "metric")
"""Names that differ only in signs which Prometheus does not know become one, and ``metric`` tells them apart."""

MAX_PORT = 65535

OWN = {"step": "The last step.", "step_timestamp_seconds": "When it ended, in seconds since 1970."}


class PrometheusSink:
    """Answers ``http://HOST:PORT/metrics`` until the run is closed. ``port=0`` takes a free port and says which.

    Raises:
        ConfigError: the address cannot be listened on, as where another run has the port.
    """

    def __init__(self, run: SinkRun, port: int = 9100, host: str = "127.0.0.1"):
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(
                f"tracking.sinks: prometheus(port={port}): a port is a number up to {MAX_PORT}, and 0 any that is free"
            )
        self._run = run.name
        self._values: Mapping[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"tracking.sinks: prometheus cannot listen on {host or repr(host)}:{port}: {error}. host is an address of "
                "this machine (127.0.0.1; 0.0.0.0 lets others read), and each run of it needs a port of its own: "
                "prometheus(port=9101), or port=0 for any that is free"
            ) from error
        place = f"[{host}]" if ":" in host else host
        print(f"Prometheus: http://{place}:{self._server.server_port}/metrics", flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._values = {**metrics, "step": step, "step_timestamp_seconds": time.time()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The answer to a scrape; the thread of the server asks for it."""
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in self._values.items():
            name = "tandem_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            if name not in families:
                row = explain(metric)
                words = OWN.get(metric, metric) if row is None else f"{row.meaning} Unit: {row.unit}"
                families[name] = GaugeMetricFamily(name, words, labels=LABELS)
            families[name].add_metric((self._run, metric), value)
        yield from families.values()
