"""Programs for Keras models, which print the same however they are started."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from jobs import poprun_jobs
from pages import page_programs

from popdist.examples.digits_data import load_digits

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "popdist" / "examples"
LIMIT_S = 120

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed"),
]


def lines_of(*command):
    """Return the lines that a command prints."""
    words = map(str, command)
    return poprun_jobs.run_alone(*words, environ={"KERAS_BACKEND": "jax"}, limit_s=LIMIT_S).stdout.splitlines()


def poprun(*options):
    return sys.executable, "-m", "poprun", "--num-instances=2", *options, sys.executable


@pytest.mark.complete
@pytest.mark.cores(2)
def test_digits_are_learnt_to_the_same_bits_on_one_and_two_instances(tmp_path):
    script = EXAMPLES / "keras_digits.py"
    words = ("--epochs=1", f"--data={some_digits(tmp_path)}")
    alone = lines_of(sys.executable, script, "--strategy=ipu", "--replicas=2", *words)[-1]
    last = [line for line in lines_of(*poprun("--num-replicas=2"), script, *words) if "variables" in line]
    assert [line.partition(":")[2] for line in last] == [alone] * 2
    assert float(alone.split()[0]) > 0.3  # by chance: 0.1


def some_digits(folder):
    """Write digits that fill all executions of 8 steps of two replicas, so that only one kind of execution is
    compiled.
    """
    digits = load_digits("digits")
    train, test = (
        (255 * images.squeeze(-1)).astype(np.uint8) for images in (digits.train_images[:1280], digits.test_images[:256])
    )
    labels = {"y_train": digits.train_labels[:1280], "y_test": digits.test_labels[:256]}
    np.savez(folder / "digits.npz", x_train=train, x_test=test, **labels)
    return folder / "digits.npz"


def assert_it_learns(line):
    first, last = map(float, re.findall(r"loss ([\d.]+) at first, ([\d.]+) in the end", line)[0])
    assert last < first


@pytest.mark.complete
def test_programs_of_the_pages_print_the_documented_results_and_the_quick_start_learns():
    """All programs run in one process."""
    pages = ("keras.md", "keras_loops.md", "keras_pipelines.md")
    programs = [program for page in pages for program in page_programs(page)]
    listing = EXAMPLES / "listings" / "keras_quick_start.py"
    programs.append(f"import runpy\nrunpy.run_path({str(listing)!r})\n")
    shape, loss_is_less, line = lines_of(sys.executable, "-c", "\n".join(programs))
    assert [shape, loss_is_less] == ["(200, 2)", "True"]
    assert_it_learns(line)


@pytest.mark.complete
def test_the_listing_of_a_pipeline_learns():
    [line] = lines_of(sys.executable, EXAMPLES / "listings" / "keras_pipelined.py")
    assert_it_learns(line)


def test_importing_strategies_does_not_import_keras_and_scopes_do_not_need_it():
    program = """
import json, sys, strategies
with strategies.IPUStrategy(1).scope():
    before = "keras" in sys.modules
import keras
with strategies.IPUStrategy(1).scope():
    inside = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
print(json.dumps([before, *("fit" in vars(model) for model in (inside, keras.Sequential()))]))
"""
    [line] = lines_of(sys.executable, "-c", program)
    assert json.loads(line) == [False, True, False]
