"""Metrics for TensorBoard, Prometheus, MLflow and Weights & Biases, read back with their own tools."""

import contextlib
import math
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from popdist.records.watched import Waits
from strategies.sinks.services import MOST_CLIENTS, Prometheus, TensorBoard
from strategies.sinks.sink import JobFacts, Row, reading_of

LIMIT_S = 60


def train(*steps, samples=4, **values):
    return [
        Row(step, reading_of(values or {"loss": step / 4}), time_s=1000.0 + step, samples=samples, is_training=True)
        for step in steps
    ]


def said(step, **values):
    return Row(step, reading_of(values), time_s=1000.5 + step)


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def is_installed(self):
        pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

    @staticmethod
    def written(folder, *batches):
        sink = TensorBoard(folder)
        sink.open(goes_on=False)
        for rows in batches:
            sink.write(rows)
        sink.close()

    @staticmethod
    def shown(folder):
        """Return the pairs of step and number that TensorBoard shows, by name."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder)).Reload()
        return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def test_tensorboard_shows_numbers_by_step(self, tmp_path):
        nan = {"evaluation/loss": math.inf, "mine": 2**-30}
        self.written(tmp_path / "new" / "logs", train(1, 2), [said(2, **nan)], train(3))
        shown = self.shown(tmp_path / "new" / "logs")
        assert shown["loss"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
        assert (shown["evaluation/loss"], shown["mine"]) == ([(2, math.inf)], [(2, 2**-30)])

    def test_repeated_steps_are_shown_once(self, tmp_path):
        self.written(tmp_path, train(1, 2, 3, 4))
        self.written(tmp_path, train(3, loss=9.0), train(4, loss=10.0))
        assert len(list(tmp_path.iterdir())) == 2  # even in the same second
        assert self.shown(tmp_path)["loss"] == [(1, 0.25), (2, 0.5), (3, 9), (4, 10)]

    def test_an_evaluation_before_the_repeated_step_leaves_the_step_in_place(self, tmp_path):
        self.written(tmp_path, train(1, 2, 3))
        self.written(tmp_path, [said(2, accuracy=0.5)], train(3, loss=9.0))
        assert self.shown(tmp_path) == {"loss": [(1, 0.25), (2, 0.5), (3, 9)], "accuracy": [(2, 0.5)]}

    @pytest.mark.complete
    def test_event_files_are_written_without_tensorflow_and_other_heavy_packages(self, tmp_path):
        program = (
            "import sys; from pathlib import Path; from strategies.sinks.services import TensorBoard\n"
            "from strategies.sinks.sink import Row\n"
            "before = set(sys.modules); sink = TensorBoard(Path(sys.argv[1])); sink.open(False)\n"
            "sink.write([Row(1, lambda: {'loss': 0.5})]); sink.close()\n"
            "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
            cwd=Path(__file__).parents[2],
        )
        assert {"tensorflow", "torch", "matplotlib", "PIL"}.isdisjoint(ended.stdout.split())
        assert self.shown(tmp_path) == {"loss": [(1, 0.5)]}


def await_cut(client):
    """Return when the server has cut a client off; a client that is cut off while it asks gets an error."""
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            pass


class TestPrometheus:
    @pytest.fixture(autouse=True)
    def is_installed(self):
        pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

    @staticmethod
    def answers(sink):
        """Return the answer as a dictionary by name and labels."""
        from prometheus_client.parser import text_string_to_metric_families

        host, port = sink.address
        host = f"[{host}]" if ":" in host else host
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
        assert all(family.documentation and family.type in ("counter", "gauge") for family in families)
        return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}

    def test_prometheus_answers_with_known_metrics_only(self):
        waits = Waits()
        waits.waited_s = 1.5
        sink = Prometheus("127.0.0.1", 0, JobFacts(lost=lambda: 2, restarts=1, waits=waits))
        sink.open(goes_on=False)
        try:
            begun = self.answers(sink)
            assert begun["popdist_steps_total",] == begun["popdist_samples_total",] == 0
            assert ("popdist_step",) not in begun
            sink.write(train(7, 8, loss=0.1, accuracy=math.nan))
            sink.write([said(8, **{"evaluation/loss": 3, 'a "b"\\': math.inf})])
            found = self.answers(sink)
            assert math.isnan(found.pop(("popdist_metric", "accuracy")))
            assert found == {
                ("popdist_last_step_timestamp_seconds",): 1008.0,
                ("popdist_step",): 8,
                ("popdist_steps_total",): 2,
                ("popdist_samples_total",): 8,
                ("popdist_waiting_seconds_total",): 1.5,
                ("popdist_faults_total", "lost_instance"): 2,
                ("popdist_faults_total", "restart"): 1,
                ("popdist_metric", "loss"): 0.1,
                ("popdist_metric", "evaluation/loss"): 3,
                ("popdist_metric", 'a "b"\\'): math.inf,
            }
        finally:
            sink.close()

    def test_waiting_is_not_reported_unless_measured(self):
        sink = Prometheus("127.0.0.1", 0, JobFacts())
        sink.open(goes_on=False)
        try:
            assert ("popdist_waiting_seconds_total",) not in self.answers(sink)
        finally:
            sink.close()

    def test_prometheus_listens_at_the_given_address_and_frees_it(self):
        sink = Prometheus("127.0.0.1", 0, JobFacts())
        sink.open(goes_on=False)
        address = sink.address
        assert address[0] == "127.0.0.1"
        sink.close()
        again = Prometheus(*address, JobFacts())
        again.open(goes_on=True)
        assert again.address == address
        again.close()
        again.close()

    def test_silent_clients_do_not_shut_out_those_that_ask(self, capfd):
        """Each new client finds a place; the one that has asked for nothing longest is cut off for it."""
        sink = Prometheus("127.0.0.1", 0, JobFacts(), client_limit_s=LIMIT_S)
        sink.open(goes_on=False)
        try:
            before = set(threading.enumerate())
            with contextlib.ExitStack() as held:
                clients = [held.enter_context(socket.create_connection(sink.address, LIMIT_S)) for _ in range(200)]
                clients[-1].sendall(b"GET / HTTP/1.1\r\n")  # and no more
                for client in clients[:-MOST_CLIENTS]:
                    await_cut(client)
                assert len(set(threading.enumerate()) - before) <= MOST_CLIENTS
                for _ in range(2 * MOST_CLIENTS):
                    assert ("popdist_steps_total",) in self.answers(sink)
                assert len(set(threading.enumerate()) - before) <= MOST_CLIENTS
        finally:
            sink.close()
        assert set(threading.enumerate()) <= before
        assert capfd.readouterr() == ("", "")

    def test_clients_that_read_no_answer_do_not_shut_out_others(self, monkeypatch):
        monkeypatch.setattr("strategies.sinks.services.MOST_CLIENTS", 2)
        sink = Prometheus("127.0.0.1", 0, JobFacts(), client_limit_s=LIMIT_S)
        sink.open(goes_on=False)
        sink.write([said(1, **{f"{number:0300}": 0.5 for number in range(30_000)})])  # more than sockets hold
        try:
            with contextlib.ExitStack() as held:
                for _ in range(2):
                    client = held.enter_context(socket.create_connection(sink.address, LIMIT_S))
                    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    client.recv(1)
                assert self.answers(sink)["popdist_metric", f"{7:0300}"] == 0.5
        finally:
            sink.close()

    def test_silent_clients_are_cut_off_after_a_time_and_leave_their_places(self, capfd):
        sink = Prometheus("127.0.0.1", 0, JobFacts(), client_limit_s=0.5)
        sink.open(goes_on=False)
        try:
            before = set(threading.enumerate())
            with contextlib.ExitStack() as held:
                clients = [held.enter_context(socket.create_connection(sink.address, LIMIT_S)) for _ in range(95)]
                for client in clients:
                    with contextlib.suppress(ConnectionError):  # cut off already
                        client.sendall(b"GET / HTTP/1.1\r\n")
                    await_cut(client)
                for thread in set(threading.enumerate()) - before:
                    thread.join(LIMIT_S)
                sink._server._client_limit_s = LIMIT_S  # this machine may answer slowly
                assert ("popdist_step",) not in self.answers(sink)
        finally:
            sink.close()
        assert capfd.readouterr() == ("", "")

    def test_a_slow_scraper_does_not_block_writing(self):
        sink = Prometheus("127.0.0.1", 0, JobFacts())
        sink.open(goes_on=False)
        try:
            with socket.create_connection(sink.address):  # asks for nothing
                sink.write(train(1))
                assert self.answers(sink)["popdist_step",] == 1
        finally:
            sink.close()


class TestMLflow:
    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        pytest.importorskip("mlflow", reason="MLflow is not installed")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.chdir(tmp_path)
        return (tmp_path / "store").as_uri()

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_numbers_are_in_one_run_of_instances_and_restarts_of_a_job(self, store):
        from mlflow import MlflowClient

        from strategies.sinks.services import MlflowRun

        for run, steps in (("job-1", (1, 2)), ("job-1", (3,)), ("", (1,))):
            sink = MlflowRun(store, "mine", run)
            sink.open(goes_on=False)
            sink.write(train(*steps, loss=0.1, a=math.inf))
            sink.close()
        client = MlflowClient(tracking_uri=store)
        runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
        assert len(runs) == 2
        assert {run.info.status for run in runs} == {"FINISHED"}
        [shared] = [run.info.run_id for run in runs if "popdist.run" in run.data.tags]
        history = client.get_metric_history(shared, "loss")
        assert sorted((each.step, each.value, each.timestamp) for each in history) == [
            (step, 0.1, 1000 * (1000 + step)) for step in (1, 2, 3)
        ]

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_norms_of_all_layers_and_of_each_layer_are_written(self, store):
        from mlflow import MlflowClient

        from strategies.sinks.services import MlflowRun

        sink = MlflowRun(store, "", "x")
        sink.open(goes_on=False)
        sink.write(train(1, **{"gradient_norm": 5.0, "gradient_norm/dense/kernel": 4.0, "weight_norm/b": 3.0}))
        sink.close()
        client = MlflowClient(tracking_uri=store)
        [run] = client.search_runs([client.get_experiment_by_name("popdist").experiment_id])
        assert run.data.metrics == {"gradient_norm": 5.0, "gradient_norms/dense/kernel": 4.0, "weight_norms/b": 3.0}

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_many_rows_are_written_in_batches(self, store):
        from mlflow import MlflowClient

        from strategies.sinks.services import MlflowRun

        sink = MlflowRun(store, "", "x")
        sink.open(goes_on=False)
        sink.write(train(*range(1, 602), a=1.0, b=2.0))
        sink.close()
        client = MlflowClient(tracking_uri=store)
        [run] = client.search_runs([client.get_experiment_by_name("popdist").experiment_id])
        assert len(client.get_metric_history(run.info.run_id, "b")) == 601


class TestWandb:
    def test_an_offline_run_has_the_numbers(self, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
        from strategies.sinks.services import WandbRun

        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        sink = WandbRun("mine", "job1")
        sink.open(goes_on=False)
        sink.write([*train(1, loss=0.5), said(1, **{"evaluation/loss": math.nan}), *train(2, loss=0.25)])
        sink.close()
        wandb.teardown()  # ends its process, like the end of a program
        [file] = tmp_path.glob("wandb/offline-run-*-job1/*.wandb")
        rows = list(history_of(file.read_bytes()))
        assert [(row.get("step"), row.get("loss")) for row in rows] == [("1", "0.5"), ("1", None), ("2", "0.25")]
        assert rows[1]["evaluation/loss"] in ("NaN", '"NaN"')


def history_of(data):
    """Yield the rows in the file of an offline run: LevelDB log records, none longer than a block here."""
    from wandb.proto.wandb_internal_pb2 import Record

    position = 7  # after the heading
    while position + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, position + 4)
        assert kind == 1
        record = Record.FromString(data[position + 7 : position + 7 + length])
        position += 7 + length
        if record.WhichOneof("record_type") == "history":
            yield {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
