"""Words for destinations of metrics: their meaning, and refusals before the start."""

import socket
import sys
from importlib.machinery import BuiltinImporter

import pytest

from popdist.errors import EnvironmentMismatchError
from popdist.records.metric_words import FORMS, LIBRARIES, MetricWord, fault_of, fault_of_library, parse_words, words_in
from popdist.records.watched import Waits


def test_words_are_separated_by_commas_and_add_up():
    words = parse_words(["csv:a.csv, jsonl:b:c.jsonl", "mlflow", "wandb:mine"])
    assert [(word.kind, word.target) for word in words] == [
        ("csv", "a.csv"),
        ("jsonl", "b:c.jsonl"),
        ("mlflow", ""),
        ("wandb", "mine"),
    ]
    assert [str(word) for word in words] == ["csv:a.csv", "jsonl:b:c.jsonl", "mlflow", "wandb:mine"]
    assert parse_words([""]) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "xml:a",
            "xml:a: 'xml' is no kind of destination; use one of csv:FILE, jsonl:FILE, tensorboard:FOLDER, prometheus:",
        ),
        ("run.csv", "'run.csv' is no kind of destination; use one of csv:FILE"),
        ("csv", "csv: the target is missing; write csv:FILE"),
        ("tensorboard:", "the target is missing; write tensorboard:FOLDER"),
        ("prometheus:localhost", "'localhost' is no port; write prometheus:"),
        ("prometheus:65536", "'65536' is no port"),
        ("csv:a,csv:./a", "csv:./a: metrics would go there twice; leave one out"),
    ],
)
def test_invalid_words_are_refused_with_a_way_out(text, message):
    with pytest.raises(ValueError, match=message):
        parse_words([text])
    with pytest.raises(EnvironmentMismatchError, match=f"^POPDIST_METRICS='{text}': .*{message}"):
        words_in({"POPDIST_METRICS": text})


def test_no_words_are_read_from_a_missing_or_empty_variable():
    assert words_in({}) == words_in({"POPDIST_METRICS": ""}) == ()


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("node7:9400", ("node7", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_an_address_without_a_host_is_local(target, address):
    assert MetricWord("prometheus", target).address == address


def test_paths_become_absolute_and_other_targets_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert MetricWord("csv", "a.csv").absolute.target == str(tmp_path / "a.csv")
    assert MetricWord("mlflow", "http://host").absolute.target == "http://host"


def test_an_unwritable_destination_is_refused_before_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    new = tmp_path / "new" / "folder"
    assert fault_of(MetricWord("csv", str(new / "a.csv"))) == ""
    assert not new.exists()
    assert fault_of(MetricWord("csv", str(tmp_path))).endswith("it is a folder; write csv:FILE")
    assert "is no folder; name another one" in fault_of(MetricWord("jsonl", str(tmp_path / "file" / "x" / "a.jsonl")))
    assert fault_of(MetricWord("csv", "/proc/1/a.csv")).endswith("/proc/1 cannot be written; name another file")


def test_a_file_is_not_a_folder_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    (tmp_path / "file").write_text("")
    assert "it is no folder" in fault_of(MetricWord("tensorboard", str(tmp_path / "file")))


def test_an_address_in_use_or_of_another_host_is_refused_before_the_start():
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "the metrics server cannot listen at this address (Address already in use)" in fault_of(
            MetricWord("prometheus", str(port))
        )
    assert fault_of(MetricWord("prometheus", "0")) == ""  # another process may take the same port now
    assert "the metrics server cannot listen at this address (" in fault_of(MetricWord("prometheus", "192.0.2.1:9400"))


@pytest.mark.parametrize("kind", FORMS)
def test_a_missing_library_is_named_with_its_installation(kind, monkeypatch):
    module, distribution = LIBRARIES.get(kind, ("", ""))
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("sys.meta_path", [BuiltinImporter])  # so that no library is found
    fault = f"{kind}:9400: {module} is not installed; run: pip install {distribution}" if module else ""
    assert fault_of_library(MetricWord(kind, "9400")) == fault


def test_waits_are_timed_from_the_start_of_a_collective_until_data_move():
    times = iter([10.0, 10.5, 20.0, 22.0])
    waits = Waits(lambda: next(times))
    for _ in range(2):
        waits.operation_begins(1, None)
        waits.data_moves(8)
    assert waits.waited_s == 2.5
