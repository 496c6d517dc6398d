"""Metrics for Prometheus, which asks for them."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Any, final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from strategies.sinks.sink import PlainNumber, Row, Sink
from strategies.sinks.sinks import JobFacts

logger = logging.getLogger("strategies.metrics")

MOST_CLIENTS = 16
"""Most clients that are answered at once; each takes a thread and a descriptor of the instance that trains."""
CLIENT_LIMIT_S = 10.0
"""Most seconds that a client may take to ask and to read the answer."""


@dataclass
class _Totals:
    """The figures so far.

    Attributes:
        steps: that this job has made since this instance writes.
        samples: in them.
        last: the last training step.
        numbers: the last ones by their names.
    """

    steps: int = 0
    samples: int = 0
    last: Row | None = None
    numbers: dict[str, PlainNumber] = field(default_factory=dict)


@final
class Prometheus(Sink):
    """Answers over HTTP on the address that was asked for, and on no other.

    Args:
        host: a name or an address of this host.
        port: 0: any free one; see `address`.
        job: see there.
        client_limit_s: see `CLIENT_LIMIT_S`.
    """

    way_out = "name another address of this host"

    def __init__(self, host: str, port: int, job: JobFacts, client_limit_s: float = CLIENT_LIMIT_S) -> None:
        self.name = f"prometheus:{host}:{port}"
        self._at = host, port
        self._job = job
        self._client_limit_s = client_limit_s
        self._state = _Totals()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it answers while it is open."""
        assert self._server is not None
        host, port = self._server.server_address[:2]
        return str(host), port

    def open(self, goes_on: bool) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()
        registry.register(self)
        host, port = self._at
        self._server = _Server(host, port, make_wsgi_app(registry), self._client_limit_s)
        self._thread = threading.Thread(target=self._server.serve_forever, name=self.name, daemon=True)
        self._thread.start()

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`; who asks gets the state from before or behind all rows."""
        state = _Totals(self._state.steps, self._state.samples, self._state.last, dict(self._state.numbers))
        for row in rows:
            state.numbers.update(row.values)
            if row.is_training:
                state.steps, state.samples, state.last = state.steps + 1, state.samples + row.samples, row
        self._state = state

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; called by Prometheus's library in its own thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state
        if state.last is not None:
            yield GaugeMetricFamily(
                "popdist_last_step_timestamp_seconds", "When the last step ended.", value=state.last.time_s
            )
            yield GaugeMetricFamily("popdist_step", "How many steps the training has made.", value=state.last.step)
        yield CounterMetricFamily("popdist_steps", "Steps made since this instance writes.", value=state.steps)
        yield CounterMetricFamily("popdist_samples", "Elements of data in these steps.", value=state.samples)
        if self._job.waits is not None:
            waited = self._job.waits.waited_s
            yield CounterMetricFamily("popdist_waiting_seconds", "Waited by it for other instances.", value=waited)
        faults = CounterMetricFamily("popdist_faults", "Faults that the job has survived.", labels=["kind"])
        faults.add_metric(["lost_instance"], self._job.lost())
        faults.add_metric(["restart"], self._job.restarts)
        yield faults
        metric = GaugeMetricFamily("popdist_metric", "The last value of each metric.", labels=["name"])
        for name, number in state.numbers.items():
            metric.add_metric([name], number)
        yield metric


@final
class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server with a bound on its clients, and on the time of each."""

    daemon_threads = True
    request_queue_size = 128  # 5 is the default, and a client that finds it full tries again after a second

    def __init__(self, host: str, port: int, application: Any, client_limit_s: float) -> None:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = family
        self._client_limit_s = client_limit_s
        self._accepted_s: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def process_request(self, request: Any, client_address: object) -> None:
        """Answer in a thread, unless there are too many clients."""
        if len(self._accepted_s) >= MOST_CLIENTS:
            logger.debug("prometheus: there are %d clients (MOST_CLIENTS); %s is cut off", MOST_CLIENTS, client_address)
            self.shutdown_request(request)
            return
        self._accepted_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off the clients whose time is over; called by `serve_forever` twice a second and after each request."""
        super().service_actions()
        self._cut_off(accepted_before_s=time.monotonic() - self._client_limit_s)

    def shutdown_request(self, request: Any) -> None:
        self._accepted_s.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        self._cut_off(accepted_before_s=time.monotonic())

    def handle_error(self, request: Any, client_address: object) -> None:
        """Keep what clients do wrong out of the program's output."""
        logger.debug("prometheus: the client %s was not answered: %s", client_address, sys.exc_info()[1])

    def _cut_off(self, accepted_before_s: float) -> None:
        for request, accepted_s in list(self._accepted_s.items()):
            if accepted_s <= accepted_before_s:
                with suppress(OSError):  # closed meanwhile
                    request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    """A handler that answers one request, and does not log it."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
