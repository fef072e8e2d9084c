"""The process that makes a node's metrics, and how the service starts it.

The service `envplan guard` runs this as a process of its own, so that nothing that goes wrong here
keeps it from giving clocks back:

    python -m envplan.runtime.metrics --file /var/lib/prometheus/node-exporter/envplan.prom

Every few seconds it collects the metrics (see `node_metrics`) and writes them: into a file for
node_exporter's textfile collector, whole or not at all, or at an endpoint, for which
prometheus_client must be installed (`envplan[metrics]`). The file is in Prometheus' text format,
the only one which that collector reads; the endpoint also speaks OpenMetrics.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envplan._io.files import atomic_write, check_writable
from envplan.devices import DeviceError
from envplan.errors import EnvplanError, InputError
from envplan.runtime.metric_families import Family, prometheus_text
from envplan.runtime.node_metrics import NodeMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

__all__ = ["PERIOD_S", "MetricsProcess"]

#: Between two looks, s.
PERIOD_S: Final = 5.0
_NO_CLIENT: Final = "the endpoint needs prometheus_client: pip install 'envplan[metrics]'"


class _Endpoint:
    """Serves what was collected last with prometheus_client.

    Args:
        address: to listen on.
        port: to listen on; 0: any free one.

    Raises:
        InputError: prometheus_client is not installed, or the port cannot be had.
    """

    def __init__(self, address: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError:
            raise InputError(_NO_CLIENT) from None
        self._families: list[Family] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, _ = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise InputError(f"{address}:{port}: {error.strerror}") from None
        self.port: int = server.server_port

    def show(self, families: list[Family]) -> None:
        """Serve these from now on."""
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client has them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._families:
            names = list(family.samples[0].labels) if family.samples else []
            kind = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=names)
            for sample in family.samples:
                metric.add_metric(list(sample.labels.values()), sample.value)
            yield metric


class MetricsProcess:
    """The process that collects metrics, as the service sees it.

    Args:
        file: that it writes, or None.
        listen: "ADDRESS:PORT" that it serves, or None.
        say: is told in a line when it has ended and is started again.

    Raises:
        InputError: the file's folder cannot be written, or prometheus_client is not installed.
    """

    def __init__(self, file: Path | None, listen: str | None, say: Callable[[str], object]) -> None:
        if file is not None:
            check_writable(file)
        if listen is not None and find_spec("prometheus_client") is None:
            raise InputError(_NO_CLIENT)
        self._arguments: list[str] = []
        if file is not None:
            self._arguments += ["--file", str(file.absolute())]
        if listen is not None:
            self._arguments += ["--listen", listen]
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._start_again_at = 0.0

    def keep_running(self) -> None:
        """Start it, also where it has ended; not more often than metrics are collected."""
        now = time.monotonic()
        is_running = self._process is not None and self._process.poll() is None
        if is_running or now < self._start_again_at:
            return
        if self._process is not None:
            self._say(f"metrics: ended with {self._process.returncode}; started again")
        self._start_again_at = now + PERIOD_S
        command = [sys.executable, "-P", "-m", __name__, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def run_once(self) -> None:
        """Write the file once, and wait for it.

        Raises:
            DeviceError: it could not be written.
        """
        command = [sys.executable, "-P", "-m", __name__, *self._arguments, "--once"]
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
            raise DeviceError("metrics could not be written; see the line above")


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect and write until standard input is closed, as it is when the service ends."""
    parser = argparse.ArgumentParser(prog="envplan.runtime.metrics")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--listen", metavar="ADDRESS:PORT")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args(arguments)
    node = NodeMetrics()
    try:
        endpoint = None
        if options.listen is not None:
            address, _, port = options.listen.rpartition(":")
            endpoint = _Endpoint(address, int(port))
            print(f"metrics at http://{address}:{endpoint.port}/metrics", flush=True)
        while True:
            families = node.collect()
            if options.file is not None:
                atomic_write(options.file, prometheus_text(families))
            if endpoint is not None:
                endpoint.show(families)
            if options.once or _owner_is_gone(PERIOD_S):
                return 0
    except EnvplanError as error:
        print(f"metrics: {error}", file=sys.stderr)
        return 2


def _owner_is_gone(timeout_s: float) -> bool:
    """Wait; whether standard input was closed meanwhile."""
    readable, _, _ = select.select([0], [], [], timeout_s)
    return bool(readable) and not os.read(0, 1)


if __name__ == "__main__":
    sys.exit(main())
