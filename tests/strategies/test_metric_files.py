"""Metrics in files: contents, and existing files."""

import csv
import json
import math
import os
import signal

import numpy as np
import pytest

from strategies.sinks.files import CsvFile, JsonLines
from strategies.sinks.sink import Row, reading_of

KINDS = [CsvFile, JsonLines]
AWKWARD = {
    "tenth": float(np.float32(0.1)),
    "third": 1 / 3,
    "tiny": 5e-324,
    "huge": 1.7976931348623157e308,
    "whole": 2**70,
    "minus zero": -0.0,
}


def train(*steps, **values):
    return [
        Row(step, reading_of(values or {"loss": step / 3}), time_s=step + 0.5, samples=4, is_training=True)
        for step in steps
    ]


def said(step, **values):
    return Row(step, reading_of(values), time_s=step + 0.75)


def written(kind, path, *batches, goes_on=False):
    sink = kind(path)
    sink.open(goes_on=goes_on)
    for rows in batches:
        sink.write(rows)
    sink.close()
    return read(path)


def read(path):
    """Return each row as a dictionary of numbers, without empty entries."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        found = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
        return [{name: float(value) for name, value in row.items()} for row in found]
    rows = csv.DictReader(text.splitlines(), strict=True, restkey="more")
    return [{name: float(value) for name, value in row.items() if value != ""} for row in rows]


@pytest.fixture(params=KINDS, ids=["csv", "jsonl"])
def kind(request):
    return request.param


@pytest.fixture
def path(kind, tmp_path):
    return tmp_path / "new" / f"run.{'csv' if kind is CsvFile else 'jsonl'}"


def steps_of(rows):
    return [int(row["step"]) for row in rows]


def test_rows_have_their_step_their_time_and_their_numbers(kind, path):
    rows = written(kind, path, train(1, 2), train(3))
    assert rows == [{"step": step, "time": step + 0.5, "loss": step / 3} for step in (1, 2, 3)]


def test_numbers_keep_all_their_digits(kind, path):
    [row] = written(kind, path, train(1, **AWKWARD))
    assert {name: row[name] for name in AWKWARD} == {name: float(value) for name, value in AWKWARD.items()}
    assert math.copysign(1, row["minus zero"]) == -1
    assert str(2**70) in path.read_text()


def test_nan_and_infinities_are_written_so_that_float_reads_them(kind, path):
    [row] = written(kind, path, train(1, a=math.nan, b=math.inf, c=-math.inf))
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)
    text = path.read_text()
    assert ("nan,inf,-inf" if kind is CsvFile else '"a": "NaN", "b": "Infinity", "c": "-Infinity"') in text


def test_names_can_contain_separators_and_quotes(kind, path):
    names = {'a,"b"': 1.0, "ü": 2.0, "x/y z": 3.0}
    [row] = written(kind, path, train(1, **names))
    assert {name: row[name] for name in names} == names


def test_a_metric_can_be_called_step_or_time(kind, path):
    [row] = written(kind, path, train(1, step=7, time=8))
    assert row == {"step": 1, "time": 1.5, "metric/step": 7, "metric/time": 8}


def test_names_can_appear_later_and_be_missing(kind, path):
    rows = written(kind, path, train(1), [said(1, accuracy=0.5), *train(2)], [said(2, f1=0.25, accuracy=0.75)])
    assert [sorted(row) for row in rows] == [
        ["loss", "step", "time"],
        ["accuracy", "step", "time"],
        ["loss", "step", "time"],
        ["accuracy", "f1", "step", "time"],
    ]
    assert (rows[3]["f1"], rows[3]["accuracy"]) == (0.25, 0.75)


def test_every_line_of_a_table_has_the_fields_of_its_heading(tmp_path):
    path = tmp_path / "run.csv"
    written(CsvFile, path, train(1, 2), [said(2, accuracy=0.5)], train(3, loss=1, other=2))
    lines = list(csv.reader(path.read_text().splitlines(), strict=True))
    assert lines[0] == ["step", "time", "loss", "accuracy", "other"]
    assert {len(line) for line in lines} == {5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.csv"]


def test_a_table_that_gets_a_column_keeps_its_permissions(tmp_path):
    path = tmp_path / "run.csv"
    written(CsvFile, path, train(1))
    path.chmod(0o640)
    written(CsvFile, path, train(2, other=1))
    assert path.stat().st_mode & 0o777 == 0o640


class TestAFileThatIsThere:
    def test_an_existing_file_is_continued_and_repeated_steps_appear_once(self, kind, path):
        written(kind, path, train(1, 2, 3, 4), [said(4, accuracy=0.5)])
        rows = written(kind, path, train(3, loss=9.0), train(4, 5))
        assert steps_of(rows) == [1, 2, 3, 4, 5]
        assert rows[2]["loss"] == 9
        assert not path.with_name(f"{path.name}.1").exists()

    def test_an_existing_file_is_continued_without_repeated_steps(self, kind, path):
        written(kind, path, train(1, 2))
        assert steps_of(written(kind, path, train(3), train(4))) == [1, 2, 3, 4]

    def test_an_existing_file_keeps_a_step_whose_first_new_row_has_other_metrics(self, kind, path):
        written(kind, path, train(1, 2), [said(2, accuracy=0.5), *train(3)])
        rows = written(kind, path, [said(2, accuracy=0.25)], train(3))
        assert [sorted(row)[0] for row in rows] == ["loss", "loss", "accuracy", "loss"]
        assert rows[2]["accuracy"] == 0.25

    def test_a_file_that_would_be_replaced_entirely_is_renamed(self, kind, path):
        for run in (1, 2, 3):
            written(kind, path, train(1, 2, loss=run))
        assert [row["loss"] for row in read(path)] == [3, 3]
        kept = [path.with_name(f"{path.name}.{number}") for number in (1, 2)]
        assert [kept[run].read_text().count(str(run + 1)) > 1 for run in range(2)] == [True, True]

    def test_an_instance_that_takes_over_replaces_the_file_from_the_beginning(self, kind, path):
        written(kind, path, train(1, 2))
        rows = written(kind, path, train(1, 2, 3), goes_on=True)
        assert steps_of(rows) == [1, 2, 3]
        assert not path.with_name(f"{path.name}.1").exists()

    def test_a_file_can_end_anywhere(self, kind, path):
        written(kind, path, train(1, 2, 3))
        whole = path.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        for end in range(last + 1, len(whole)):
            path.write_bytes(whole[:end])
            assert steps_of(written(kind, path, train(3, 4))) == [1, 2, 3, 4]
        for end in range(len(whole) - last):  # not even the first line is whole
            path.write_bytes(whole[:end])
            assert steps_of(written(kind, path, train(1), goes_on=True)) == [1]

    def test_a_file_of_another_kind_is_refused_and_stays(self, kind, path):
        path.parent.mkdir()
        path.write_text("dear diary\nmore")
        sink = kind(path)
        with pytest.raises(ValueError, match="the file exists and does not begin with .*; name another file"):
            sink.open(goes_on=False)
        sink.close()
        assert path.read_text() == "dear diary\nmore"


def test_one_process_only_appends_rows(kind, path):
    assert steps_of(written(kind, path, train(1, 2), train(1, 2))) == [1, 2, 1, 2]


def test_a_pipe_takes_lines(kind, path):
    path.parent.mkdir()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        sink = kind(path)
        sink.open(goes_on=False)
        sink.write(train(1, loss=2.0))
        found = os.read(reader, 1000).decode()
        assert found.endswith("1,1.5,2.0\n" if kind is CsvFile else '{"step": 1, "time": 1.5, "loss": 2.0}\n')
        sink.close()
    finally:
        os.close(reader)


def test_a_second_writer_of_a_file_is_refused(kind, path):
    first, second = kind(path), kind(path)
    first.open(goes_on=False)
    with pytest.raises(BlockingIOError, match="another job, or another sink of this job, writes to it"):
        second.open(goes_on=False)
    first.write(train(1))
    first.write([said(2, accuracy=1.0)])  # a table is written anew
    with pytest.raises(BlockingIOError):
        second.open(goes_on=True)
    first.close()
    assert steps_of(read(path)) == [1, 2]
    assert steps_of(written(kind, path, train(3), goes_on=True)) == [1, 2, 3]


def test_a_file_that_is_set_aside_leaves_its_name_locked(kind, path):
    written(kind, path, train(1, 2))
    first = kind(path)
    first.open(goes_on=False)
    first.write(train(1))
    with pytest.raises(BlockingIOError):
        kind(path).open(goes_on=False)
    first.close()
    assert steps_of(read(path)) == [1]


def test_a_killed_writer_leaves_its_file_to_the_next_one(kind, path):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        sink = kind(path)
        sink.open(goes_on=False)
        sink.write(train(1))
        os.write(writing, b".")
        signal.pause()
    os.close(writing)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    with pytest.raises(BlockingIOError):
        kind(path).open(goes_on=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert steps_of(written(kind, path, train(2), goes_on=True)) == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"step": ' + b"[" * 100_000,
        b'{"step": 1e999}',
        b"9" * 5000 + b",1,2",
        b'1,2,"' + b"x" * 200_000,
    ],
    ids=["deep", "deep step", "infinite step", "many digits", "long field"],
)
def test_a_damaged_line_stays_and_the_file_is_continued(kind, path, line):
    written(kind, path, train(1, 2))
    with path.open("ab") as file:
        file.write(line + b"\n")
    sink = kind(path)
    sink.open(goes_on=True)
    sink.write(train(3))
    sink.close()
    kept = path.read_bytes().splitlines()
    assert kept[-2] == line
    assert b"3.5" in kept[-1]
