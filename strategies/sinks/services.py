"""Metrics for TensorBoard, MLflow, Weights & Biases, and Prometheus."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from typing_extensions import override

from popdist.records.distribution_settings import GRADIENT_NORM, WEIGHT_NORM
from strategies.sinks.sink import STEP, Distribution, JobFacts, PlainNumber, Row, Sink

_numbers = itertools.count()
_VERSION = "brain.Event:2"


@final
class TensorBoard(Sink):
    """An event file in a folder; every instance that writes, and every start of the job, makes a new file.

    TensorBoard hides values of older files from the first step of a newer file on. Numbers are float32, as in all
    events. (tensorboardX, which is smaller, imports PyTorch if that is installed, and gives two files of one second the
    same name.)
    """

    way_out = "make room there, or name another folder"

    def __init__(self, folder: Path) -> None:
        self.name = f"tensorboard:{folder}"
        self._folder = folder
        self._writer: Any = None
        self._is_begun = False

    @override
    def open(self, goes_on: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now_s = time.time()  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{now_s:.6f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._writer = RecordWriter((self._folder / name).open("xb"))
        self._is_begun = False
        self._writer.write(Event(wall_time=now_s, file_version=_VERSION).SerializeToString())
        self._writer.flush()

    @override
    def write(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._is_begun:
            first = rows[0].step + (not rows[0].is_training)
            start = SessionLog(status=SessionLog.START)
            self._writer.write(Event(step=first, wall_time=rows[0].time_s, session_log=start).SerializeToString())
            self._is_begun = True
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=number) for name, number in row.values.items()]
            values += [Summary.Value(tag=name, histo=_histogram(each)) for name, each in row.distributions.items()]
            event = Event(step=row.step, wall_time=row.time_s, summary=Summary(value=values))
            self._writer.write(event.SerializeToString())
        self._writer.flush()

    @override
    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def _histogram(distribution: Distribution) -> object:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    return HistogramProto(
        min=distribution.least,
        max=distribution.most,
        num=distribution.size,
        sum=distribution.total,
        sum_squares=distribution.squares,
        bucket_limit=distribution.edges[1:].tolist(),
        bucket=distribution.counts.tolist(),
    )


EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
_USUAL_EXPERIMENT = "popdist"
_TAG = "popdist.run"
_MOST_IN_A_BATCH = 1000  # the limit of MLflow's log-batch request


@final
class MlflowRun(Sink):
    """A run in an MLflow experiment.

    If steps are made again, their values are added behind the earlier ones, because MLflow cannot replace values.
    Of a distribution it gets the quantiles and the other numbers. The norms of layers have the plural as their folder,
    `gradient_norms/LAYER`: in a folder of MLflow, `gradient_norm` is a file.

    Args:
        uri: URI of the tracking server or its folder; empty: chosen by MLflow's own variables.
        experiment: Name of the experiment; empty: "popdist".
        run: Name of one run shared by all instances and restarts of the job; empty: each has its own run.
    """

    way_out = "check its server, or name another URI"

    def __init__(self, uri: str, experiment: str, run: str) -> None:
        self.name = f"mlflow:{uri}" if uri else "mlflow"
        self._uri = uri
        self._experiment = experiment or _USUAL_EXPERIMENT
        self._run = run
        self._run_id = ""
        self._client: Any = None

    @override
    def open(self, goes_on: bool) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri or None)
        if not self._run_id:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
            of_job = f"tags.`{_TAG}` = '{self._run}'"
            runs = self._client.search_runs([experiment], of_job, max_results=1) if self._run else []
            tags = {_TAG: self._run} if self._run else None
            self._run_id = str((runs[0] if runs else self._client.create_run(experiment, tags=tags)).info.run_id)

    @override
    def write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics = (
            Metric(_path_of(name), number, int(1000 * row.time_s), row.step)
            for row in rows
            for name, number in row.all_values.items()
        )
        while batch := list(islice(metrics, _MOST_IN_A_BATCH)):
            self._client.log_batch(self._run_id, metrics=batch)

    @override
    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run_id, "FINISHED")


def _path_of(name: str) -> str:
    """Return the name of a number in MLflow."""
    kind, slash, layer = name.partition("/")
    return f"{kind}s/{layer}" if slash and kind in (GRADIENT_NORM, WEIGHT_NORM) else name


@final
class WandbRun(Sink):
    """A run of Weights & Biases. Its own variables decide the rest, for example WANDB_MODE=offline and WANDB_DIR.

    "step" is the axis of all numbers. If steps are made again, their numbers are added behind the earlier ones.

    Args:
        project: Name of the project; empty: chosen by the variables of Weights & Biases.
        run: Id of one run shared by all instances and restarts of the job; empty: each has its own run.
    """

    way_out = "log in to it, or set WANDB_MODE=offline"

    def __init__(self, project: str, run: str) -> None:
        self.name = f"wandb:{project}" if project else "wandb"
        self._project = project
        self._id = run
        self._run: Any = None

    @override
    def open(self, goes_on: bool) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=self._project or None, id=self._id or None, resume="allow", reinit="create_new", settings=settings
        )
        self._id = self._run.id
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @override
    def write(self, rows: Sequence[Row]) -> None:
        """Hand the rows to the process of Weights & Biases, which sends them."""
        import wandb

        for row in rows:
            of_all = row.distributions.items()
            histograms = {name: wandb.Histogram(np_histogram=(each.counts, each.edges)) for name, each in of_all}
            self._run.log({STEP: row.step, "_timestamp": row.time_s, **histograms, **row.values})

    @override
    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


# ---- Prometheus

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
