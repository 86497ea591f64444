"""Prometheus: an HTTP endpoint with the metrics of the last step. By default only this machine can reach it (``host``)."""

import re
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from tandem.config.errors import ConfigError
from tandem.tracking.catalog import explain
from tandem.tracking.sinks import SinkRun

LABELS = ("run", "metric")
"""Labels of each value. ``metric`` is the original name: Prometheus forbids some characters, so several metrics may share a
name."""

MAX_PORT = 65535

OWN = {"step": "The last step.", "step_timestamp_seconds": "The end of the last step, in seconds since 1970."}


class PrometheusSink:
    """Serves ``http://HOST:PORT/metrics`` until the run is closed. ``port=0`` takes a free port, which is printed.

    Raises:
        ConfigError: the address cannot be used, for example because another run uses the port.
    """

    def __init__(self, run: SinkRun, port: int = 9100, host: str = "127.0.0.1"):
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(
                f"tracking.sinks: prometheus(port={port}): port must be 1 to {MAX_PORT}, or 0 for any free port"
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
                "this machine (127.0.0.1; with 0.0.0.0 other machines can read), and each run needs its own port: "
                "prometheus(port=9101), or port=0 for any free port"
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
        """Yields the metrics for a scrape. Called by the server's thread."""
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in self._values.items():
            name = "tandem_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            if name not in families:
                row = explain(metric)
                words = OWN.get(metric, metric) if row is None else f"{row.meaning} Unit: {row.unit}"
                families[name] = GaugeMetricFamily(name, words, labels=LABELS)
            families[name].add_metric((self._run, metric), value)
        yield from families.values()
