"""Metrics for Prometheus, which asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from strategies.sinks.row import Number, Row
from strategies.sinks.sink import Sink
from strategies.sinks.sinks import Job


@dataclass
class _State:
    """What is known so far.

    Attributes:
        steps: that this job has made since this instance writes.
        samples: in them.
        last: the last training step.
        numbers: the last ones by their names.
    """

    steps: int = 0
    samples: int = 0
    last: Row | None = None
    numbers: dict[str, Number] = field(default_factory=dict)


@final
class Prometheus(Sink):
    """Answers over HTTP on the address that was asked for, and on no other.

    Args:
        host: a name or an address of this host.
        port: 0: any free one; see `address`.
        job: see there.
    """

    way_out = "name another address of this host"

    def __init__(self, host: str, port: int, job: Job) -> None:
        self.name = f"prometheus:{host}:{port}"
        self._at = host, port
        self._job = job
        self._state = _State()
        self._server: Any = None
        self._thread: Any = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it answers while it is open."""
        host, port = self._server.server_address[:2]
        return host, port

    def open(self, goes_on: bool) -> None:
        """See `Sink`."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        host, port = self._at
        self._server, self._thread = start_http_server(port, host, registry)

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`; who asks gets the state from before or behind all rows."""
        state = _State(self._state.steps, self._state.samples, self._state.last, dict(self._state.numbers))
        for row in rows:
            state.numbers.update(row.values)
            if row.is_training:
                state.steps, state.samples, state.last = state.steps + 1, state.samples + row.samples, row
        self._state = state

    def close(self) -> None:
        """See `Sink`."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """What Prometheus's library asks for, in its own thread."""
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
