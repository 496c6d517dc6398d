"""The command that compares data with compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.measure import bottleneck

ROOT = Path(__file__).parents[2]

PROGRAM = """
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

def make_distributed(strategy, workers=0):
    assert strategies.get_strategy() is strategy
    return strategy.distribute_dataset(strategies.GrainSource(Rows(), num_workers=workers), batch_size=4)

def make_loaded(strategy):
    return make_distributed(strategy, 1)

def make_step():
    def step(batch):
        steps.append(batch["x"].shape)
        return jnp.sum(batch["x"])
    return step

steps = []
"""


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


def check_comparison(out):
    """Check that every figure follows from the others."""
    heading, *rows, data, compute, verdict = out.splitlines()
    assert heading.split() == ["epoch", "batches", "elements/s", "GB/s", "ms", "per", "batch"]
    assert [row.split()[:2] for row in rows] == [["0", "20"], ["1", "20"], ["2", "20"]]
    for row in rows:
        per_second, _, ms = map(float, row.split()[2:])
        assert per_second == pytest.approx(8 / (ms / 1e3), rel=0.1)  # ms have three decimals
    assert "ms per batch of 8 elements" in data
    is_slower = float(data.split()[1]) > float(compute.split()[1])
    assert verdict.startswith("Data is the bottleneck" if is_slower else "Compute is the bottleneck")


def test_the_command_compares_the_data_with_the_programs_own_step(program, in_process):
    words = [f"{program}:make_distributed", f"{program}:make_step", "--replicas", "2", "--epochs", "3"]
    check_comparison(in_process(*words, "--batches", "20").out)
    assert sys.modules["measured_program"].steps == [(8, 8)] * (bottleneck.WARM_UP_STEPS + bottleneck.TIMED_STEPS)


@pytest.mark.complete
def test_the_command_works_as_a_process_with_workers(program):
    words = [f"{program}:make_loaded", f"{program}:make_step", "--replicas", 2, "--epochs", 3, "--batches", 20]
    status, out, error = command(*words)
    assert status == 0, error
    check_comparison(out)


@pytest.mark.parametrize(
    ("data_ms", "step_ms", "words"),
    [
        (4.0, 1.0, "Data is the bottleneck: the devices wait 75 % of the time. Load with more processes"),
        (1.0, 4.0, "Compute is the bottleneck: the data are ready in 25 % of a step's time."),
        (2.0, 2.0, "Compute is the bottleneck: the data are ready in 100 % of a step's time."),
    ],
)
def test_the_slower_part_is_named_as_the_bottleneck(data_ms, step_ms, words, capsys):
    bottleneck._print_verdict(data_ms, step_ms)
    compute, verdict = capsys.readouterr().out.splitlines()
    assert compute == f"compute: {step_ms:.3f} ms per step"
    assert verdict.startswith(words)


def test_the_command_names_the_data_when_a_step_is_short(program, in_process):
    out = in_process(f"{program}:make_dataset", "--batch-size", "4", "--step-ms", "1e-6", "--batches", "5")
    assert "Data is the bottleneck: the devices wait 100 % of the time" in out.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere.py:f"], "'nowhere.py:f' does not name a function"),
        (["PROGRAM"], "does not name a function; write PROGRAM.py:FUNCTION"),
        (
            ["PROGRAM:make"],
            "has no function 'make'; it has make_dataset, make_distributed, make_loaded, make_step",
        ),
        (["PROGRAM:make_dataset", "--batch-size", "0"], "argument --batch-size: '0' is not a positive int"),
        (["PROGRAM:make_dataset", "--batch-size", "65"], "argument --batch-size: one global batch takes 65 elements"),
        (["PROGRAM:make_distributed", "--batch-size", "1"], "has distributed its data set; leave"),
        (["PROGRAM:make_dataset", "PROGRAM:make_step", "--step-ms", "1"], "not both"),
        (["PROGRAM:make_dataset", "--step-ms", "nan"], "argument --step-ms: 'nan' is not a positive float"),
    ],
)
def test_wrong_arguments_are_one_clear_error(program, in_process, words, error):
    out = in_process(*(word.replace("PROGRAM", str(program)) for word in words), status=2)
    assert error in out.err
    assert out.err.count("\n") == 2  # the usage, and the error


@pytest.fixture
def in_process(capsys):
    """Provide a function that runs the command in this process and returns its output."""

    def run(*words, status=0):
        ended = 0
        try:
            bottleneck.main(words)
        except SystemExit as end:
            ended = end.code
        assert ended == status
        return capsys.readouterr()

    return run
