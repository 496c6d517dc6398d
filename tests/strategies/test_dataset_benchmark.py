"""The original's benchmarks of input, and the command that compares data with compute."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strategies import EndOfDataError, InfeedQueue, bottleneck, dataset_benchmark, infeed_benchmark

ROOT = Path(__file__).parents[2]

FIGURES = ["elements_processed", "total_bytes_processed", "time_elapsed", "elements_per_second", "bandwidth"]

PROGRAM = """
import time
import numpy as np
import jax.numpy as jnp
import strategies

def make_dataset():
    return {"x": np.ones((64, 8), np.float32)}

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": np.ones(8, np.float32)}

def make_distributed(strategy):
    assert strategies.get_strategy() is strategy
    return strategy.distribute_dataset(strategies.GrainSource(Rows(), num_workers=1), batch_size=4)

def make_step():
    def step(batch):
        time.sleep(0.1)
        return jnp.sum(batch["x"])
    return step
"""


def increasing(number, shape):
    """Elements of ones, twos, threes, ..."""
    return (np.full(shape, value, np.float32) for value in range(1, number + 1))


class TestFunctions:
    """Rows B-01 to B-03."""

    @pytest.mark.parametrize("do_memcpy", [True, False])
    def test_with_a_data_set(self, do_memcpy):
        result = json.loads(dataset_benchmark(increasing(10_000, (4, 4)), 10, 1000, do_memcpy=do_memcpy))
        assert len(result["epochs"]) == 10
        for epoch in result["epochs"]:
            assert sorted(epoch) == sorted(FIGURES)
            assert all(isinstance(figure, float) and figure > 0 for figure in epoch.values())
            assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (1000, 64_000)
            seconds = epoch["time_elapsed"]
            assert epoch["elements_per_second"] == pytest.approx(1000 / seconds, rel=1e-5)
            assert epoch["bandwidth"] == pytest.approx(64_000 / (1e9 * seconds), rel=1e-5)

    @pytest.mark.parametrize("do_memcpy", [True, False])
    def test_with_an_infeed(self, do_memcpy):
        infeed = InfeedQueue(increasing(5 * 256, (4, 4)))
        result = json.loads(infeed_benchmark(infeed, 5, 256, do_memcpy=do_memcpy))
        assert len(result["epochs"]) == 5
        for epoch in result["epochs"]:
            assert sorted(epoch) == sorted(FIGURES)
            assert all(isinstance(figure, float) and figure > 0 for figure in epoch.values())
            assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (256, 256 * 64)

    def test_a_distributed_data_set_begins_anew(self, strategy):
        dataset = strategy.distribute_dataset({"x": np.ones((50, 3), np.uint8)}, batch_size=4)
        (epoch,) = json.loads(dataset_benchmark(dataset, 1, elements_per_epoch=7))["epochs"]
        assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (7, 7 * 4 * 4 * 3)

    def test_a_dimension_of_size_0(self):
        words = "Detected a tensor in the dataset with a dimension of size 0"
        with pytest.raises(ValueError, match=words):
            dataset_benchmark(increasing(10, (4, 0)), 1, 5)
        with pytest.raises(ValueError, match=words):
            infeed_benchmark(InfeedQueue(increasing(10, (4, 0))), 1, 5)

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ((0, 5), ValueError, "number_of_epochs is 0; it must be at least 1"),
            ((1, 0), ValueError, "elements_per_epochs is 0; it must be at least 1"),
            ((1.5, 5), TypeError, "number_of_epochs is 1.5; an integer"),
            ((1, "5"), TypeError, "elements_per_epochs is '5'; an integer"),
            ((1,), TypeError, "give the elements of an epoch once"),
            ((2, 6), ValueError, "the data set ended after 10 of 12 elements"),
        ],
    )
    def test_bad_arguments_are_raised_and_not_returned(self, arguments, error, words):
        with pytest.raises(error, match=words):
            dataset_benchmark(increasing(10, (2,)), *arguments)
        infeed = InfeedQueue(increasing(10, (2,)))
        with pytest.raises(EndOfDataError if "ended" in words else error, match=None if "ended" in words else words):
            infeed_benchmark(infeed, *arguments)

    def test_what_is_no_data_set_is_refused(self):
        with pytest.raises(TypeError, match="is a int, which cannot be iterated"):
            dataset_benchmark(3, 1, 1)
        with pytest.raises(TypeError, match="infeed_queue is a list; use a strategies.InfeedQueue"):
            infeed_benchmark([], 1, 1)
        with pytest.raises(TypeError, match="is a str; arrays of numbers are needed"):
            dataset_benchmark(["a"], 1, 1)

    def test_log(self, caplog):
        caplog.set_level(logging.INFO)
        dataset_benchmark(increasing(10, (2,)), 2, 5)
        said = [record.getMessage() for record in caplog.records]
        assert [line.split()[0] for line in said] == ["Processed:", "Bandwidth:", "Dataset"] * 2
        assert said[0].endswith(" elements/second.")
        assert said[1].endswith(" GB/s.")
        assert said[5] == "Dataset iterator completed epoch 1."
        caplog.clear()
        dataset_benchmark(increasing(10, (2,)), 1, 5, print_stats=False)
        assert [record.getMessage() for record in caplog.records] == ["Dataset iterator completed epoch 0."]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "measured_program.py"
    path.write_text(PROGRAM)
    return path


def command(*words):
    finished = subprocess.run(
        [sys.executable, "-m", "strategies.dataset_benchmark", *map(str, words)],
        env={k: v for k, v in os.environ.items() if not k.startswith("POPDIST_")} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return finished.returncode, finished.stdout, finished.stderr


def test_the_command_compares_the_data_with_the_programs_own_step(program):
    words = [f"{program}:make_distributed", f"{program}:make_step", "--replicas", 2, "--epochs", 3, "--batches", 20]
    status, out, error = command(*words)
    assert (status, error) == (0, "")
    heading, *rows, data, compute, verdict = out.splitlines()
    assert heading.split() == ["epoch", "batches", "elements/s", "GB/s", "ms", "per", "batch"]
    assert [row.split()[:2] for row in rows] == [["0", "20"], ["1", "20"], ["2", "20"]]
    for row in rows:
        per_second, _, ms = map(float, row.split()[2:])
        assert per_second == pytest.approx(8 / (ms / 1e3), rel=0.01)
    assert "ms per batch of 8 elements" in data
    assert float(compute.split()[1]) >= 100
    assert verdict.startswith("Compute is the bottleneck")


def test_the_command_names_the_data_when_a_step_is_short(program, in_process):
    out = in_process(f"{program}:make_dataset", "--batch-size", "4", "--step-ms", "1e-6", "--batches", "5")
    assert "Data is the bottleneck: the devices wait 100 % of the time" in out.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere.py:f"], "'nowhere.py:f' names no function"),
        (["PROGRAM"], "names no function: PROGRAM.py:FUNCTION is needed"),
        (["PROGRAM:make"], "has no function 'make'; it has make_dataset, make_distributed, make_step"),
        (["PROGRAM:make_dataset", "--batch-size", "0"], "argument --batch-size: '0' is no int above 0"),
        (["PROGRAM:make_dataset", "--batch-size", "65"], "argument --batch-size: one global batch takes 65 elements"),
        (["PROGRAM:make_distributed", "--batch-size", "1"], "has distributed its data set already"),
        (["PROGRAM:make_dataset", "PROGRAM:make_step", "--step-ms", "1"], "not both"),
        (["PROGRAM:make_dataset", "--step-ms", "nan"], "argument --step-ms: 'nan' is no float above 0"),
    ],
)
def test_wrong_arguments_are_one_clear_error(program, in_process, words, error):
    out = in_process(*(word.replace("PROGRAM", str(program)) for word in words), status=2)
    assert error in out.err
    assert out.err.count("\n") == 2  # the usage, and the error


@pytest.fixture
def in_process(capsys):
    """The command in this process: what it prints."""

    def run(*words, status=0):
        ended = 0
        try:
            bottleneck.main(words)
        except SystemExit as end:
            ended = end.code
        assert ended == status
        return capsys.readouterr()

    return run
