"""A /metrics port for Prometheus on this machine: every metric's latest value as a gauge."""

# pyright: standard, reportMissingImports=false
# The package is an extra.

import logging
import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from nanorl.types import StepReport


class PrometheusTracker(Collector):
    """`rollout/reward/mean` becomes `nanorl_rollout_reward_mean{run="..."}`."""

    name = "prometheus"

    def __init__(self, port: int, run: str) -> None:
        """Listens on 127.0.0.1 only; port 0 takes a free one. Raises: OSError where the port is taken."""
        self._run = run
        self._values: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.port: int = self._server.server_port
        logging.getLogger(__name__).info("Prometheus metrics at http://127.0.0.1:%d/metrics", self.port)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What one scrape sees: always the values of one step."""
        for name, value in self._values.items():
            gauge = GaugeMetricFamily(
                re.sub(r"\W", "_", f"nanorl_{name}"), f"{name}, see docs/metrics.md", labels=["run"]
            )
            gauge.add_metric([self._run], value)
            yield gauge

    def log(self, report: StepReport) -> None:
        """Replaces all values at once."""
        self._values = {"step": report.step, "weight_version": report.weight_version, **report.metrics}

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
