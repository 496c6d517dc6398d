"""Metrics for Prometheus, which fetches them from the job over HTTP."""

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

from typing_extensions import override

from strategies.sinks.sink import PlainNumber, Row, Sink
from strategies.sinks.sinks import JobFacts

logger = logging.getLogger("strategies.metrics")

MOST_CLIENTS = 16
"""The most clients answered at once; each takes a thread and a descriptor of the training instance."""
CLIENT_LIMIT_S = 10.0
"""The most seconds that a client may take to send its request and read the answer."""


@dataclass
class _Totals:
    """The totals so far.

    Attributes:
        steps: Steps that this job has made since this instance began to write.
        samples: Elements of data in these steps.
        last: Last training step.
        numbers: Last value of each name.
    """

    steps: int = 0
    samples: int = 0
    last: Row | None = None
    numbers: dict[str, PlainNumber] = field(default_factory=dict)


@final
class Prometheus(Sink):
    """A server of metrics over HTTP that listens only on the address it was given.

    Args:
        host: Name or address of this host.
        port: Port; 0 for any free one, which `address` tells.
        job: Facts about the job.
        client_limit_s: The most seconds that a client may take, see `CLIENT_LIMIT_S`.
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
        """The address at which the open sink answers."""
        assert self._server is not None
        host, port = self._server.server_address[:2]
        return str(host), port

    @override
    def open(self, goes_on: bool) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()
        registry.register(self)
        host, port = self._at
        self._server = _Server(host, port, make_wsgi_app(registry), self._client_limit_s)
        self._thread = threading.Thread(target=self._server.serve_forever, name=self.name, daemon=True)
        self._thread.start()

    @override
    def write(self, rows: Sequence[Row]) -> None:
        """Take all rows at once: a client gets the state before or after all of them."""
        state = _Totals(self._state.steps, self._state.samples, self._state.last, dict(self._state.numbers))
        for row in rows:
            state.numbers.update(row.all_values)
            if row.is_training:
                state.steps, state.samples, state.last = state.steps + 1, state.samples + row.samples, row
        self._state = state

    @override
    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; Prometheus's library calls this in its own thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state
        if state.last is not None:
            yield GaugeMetricFamily(
                "popdist_last_step_timestamp_seconds", "Time at which the last step ended.", value=state.last.time_s
            )
            yield GaugeMetricFamily("popdist_step", "Number of steps of the training.", value=state.last.step)
        yield CounterMetricFamily("popdist_steps", "Steps since this instance began to write.", value=state.steps)
        yield CounterMetricFamily("popdist_samples", "Elements of data in these steps.", value=state.samples)
        if self._job.waits is not None:
            waited = self._job.waits.waited_s
            yield CounterMetricFamily("popdist_waiting_seconds", "Seconds it waited for other instances.", value=waited)
        faults = CounterMetricFamily("popdist_faults", "Faults that the job has survived.", labels=["kind"])
        faults.add_metric(["lost_instance"], self._job.lost())
        faults.add_metric(["restart"], self._job.restarts)
        yield faults
        metric = GaugeMetricFamily("popdist_metric", "The last value of each metric.", labels=["name"])
        for name, number in state.numbers.items():
            metric.add_metric([name], number)
        yield metric


@dataclass(frozen=True)
class _Client:
    """A client that is being answered.

    Attributes:
        accepted_s: The time at which it was accepted.
        thread: The thread that reads its request and answers.
    """

    accepted_s: float
    thread: threading.Thread


@final
class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server that limits the number of its clients, and the time of each."""

    daemon_threads = True
    request_queue_size = 128  # by default 5; a client that finds the queue full tries again only after a second

    def __init__(self, host: str, port: int, application: Any, client_limit_s: float) -> None:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = family
        self._client_limit_s = client_limit_s
        self._clients: dict[socket.socket, _Client] = {}
        self._silent: dict[socket.socket, None] = {}  # clients from which nothing was read, the oldest one first
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def process_request(self, request: Any, client_address: object) -> None:
        """Answer in a thread. If there are too many clients, cut off the one that has been silent longest."""
        if len(self._clients) >= MOST_CLIENTS:
            logger.debug("prometheus: already %d clients (MOST_CLIENTS); the oldest is cut off", MOST_CLIENTS)
            silent = [each for each in list(self._silent) if _is_silent(each)]
            for oldest in (silent or list(self._clients))[:1]:
                self._cut_off(oldest)
        arguments = (request, client_address)
        thread = threading.Thread(target=self.process_request_thread, args=arguments, daemon=self.daemon_threads)
        self._clients[request], self._silent[request] = _Client(time.monotonic(), thread), None
        thread.start()

    def has_asked(self, request: socket.socket) -> None:
        """Note that a client has sent something."""
        self._silent.pop(request, None)

    def service_actions(self) -> None:
        """Cut off clients that exceed their time; `serve_forever` calls this twice a second and after each request."""
        super().service_actions()
        self._cut_off_before(time.monotonic() - self._client_limit_s)

    @override
    def shutdown_request(self, request: Any) -> None:
        self._silent.pop(request, None)
        self._clients.pop(request, None)
        super().shutdown_request(request)

    @override
    def server_close(self) -> None:
        super().server_close()
        self._cut_off_before(time.monotonic())

    def handle_error(self, request: Any, client_address: object) -> None:
        """Keep errors of clients out of the program's output."""
        logger.debug("prometheus: the client %s was not answered: %s", client_address, sys.exc_info()[1])

    def _cut_off_before(self, accepted_s: float) -> None:
        for request, client in list(self._clients.items()):
            if client.accepted_s <= accepted_s:
                self._cut_off(request)

    def _cut_off(self, request: socket.socket) -> None:
        client = self._clients.get(request)
        with suppress(OSError):  # closed meanwhile
            request.shutdown(socket.SHUT_RDWR)
        if client is not None:
            client.thread.join()  # it waits for its client only, which is gone


@final
class _Handler(WSGIRequestHandler):
    """A handler that answers one request, and does not log it."""

    server: _Server

    @override
    def handle(self) -> None:
        self.connection.recv(1, socket.MSG_PEEK)  # until then, the server sees that the client is silent
        self.server.has_asked(self.connection)
        super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _is_silent(request: socket.socket) -> bool:
    """Return whether nothing of a client's request has come."""
    try:
        request.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:  # closed meanwhile
        return False
    return False
