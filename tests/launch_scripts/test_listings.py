"""Runs of the documentation's listings."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import poprun_jobs

import strategies

LISTINGS = Path(__file__).parents[2] / "popdist" / "examples" / "listings"

LIMIT_S = 100
VARIABLES = {  # variables that the tests check in each listing; only the last two listings start popdist
    "training_loop.py": ["losses"],
    "iterator_form.py": ["means"],
    "read_while_running.py": ["losses", "reads"],
    "wider_accumulator.py": ["wide", "narrow"],
    "replicated_training.py": ["losses", "inputs", "targets", "weights"],
    "pipelined_training.py": ["losses"],
}
RUN = """
import contextlib, io, json, pathlib, runpy, sys, numpy, strategies
strategies.LocalStrategy(4)  # JAX's devices are fixed when it starts
folder, results = map(pathlib.Path, sys.argv[1:3])
for name, variables in json.loads(sys.argv[3]).items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = runpy.run_path(str(folder / name))
    (results / f"{name}.txt").write_text(printed.getvalue())
    numpy.savez(results / f"{name}.npz", **{each: numpy.asarray(found[each], numpy.float64) for each in variables})
"""

pytestmark = [pytest.mark.job, pytest.mark.timeout(2 * LIMIT_S + 20)]


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    """Run all listings in one process; return a function of a listing's name that returns variables as float64 and
    output.
    """
    folder = tmp_path_factory.mktemp("listings")
    poprun_jobs.run_alone(sys.executable, "-c", RUN, str(LISTINGS), str(folder), json.dumps(VARIABLES))
    return lambda name: (np.load(folder / f"{name}.npz"), (folder / f"{name}.txt").read_text())


@pytest.mark.complete
def test_a_training_loop_learns_and_returns_its_losses(listing):
    found, printed = listing("training_loop.py")
    assert found["losses"].shape == (200,)
    assert found["losses"][-1] < 1e-3 < found["losses"][0]
    assert printed == f"loss {found['losses'][0]:.3f} at first, {found['losses'][-1]:.6f} in the end\n"


@pytest.mark.complete
def test_the_iterator_form_continues_from_epoch_to_epoch(listing):
    found, printed = listing("iterator_form.py")
    assert sorted(found["means"], reverse=True) == list(found["means"])
    assert found["means"][-1] < 1e-3
    assert len(printed.splitlines()) == 4


@pytest.mark.complete
def test_losses_are_read_while_the_loop_runs(listing):
    found, _ = listing("read_while_running.py")
    assert len(found["losses"]) == sum(found["reads"]) == 500
    assert found["losses"][-1] < found["losses"][0] / 100


@pytest.mark.complete
def test_replicas_train_together(listing):
    found, printed = listing("replicated_training.py")
    assert found["losses"].shape == (100, 4)
    assert found["losses"][-1].mean() < 1e-3
    weights = np.zeros((8, 1))
    for x, y in zip(found["inputs"].reshape(100, -1, 8), found["targets"].reshape(100, -1, 1), strict=True):
        weights -= 0.05 * 2 * x.T @ (x @ weights - y) / len(x)
    np.testing.assert_allclose(found["weights"], weights, atol=1e-5)
    assert printed.split()[-1] == strategies.fingerprint(found["weights"].astype(np.float32))


@pytest.mark.complete
def test_a_pipeline_trains(listing):
    found, printed = listing("pipelined_training.py")
    assert found["losses"].shape == (160, 4)
    assert found["losses"][-1].mean() < found["losses"][0].mean() / 10
    assert printed.startswith(f"loss {found['losses'][0].mean():.3f} at first")


@pytest.mark.complete
@pytest.mark.cores(2)
def test_two_instances_train_to_the_same_bits(listing, tmp_path):
    """One job runs both listings; each instance has two of the four replicas, and each replica has two devices."""
    names = ("replicated_training.py", "pipelined_training.py")
    program = tmp_path / "program.py"
    program.write_text(f"import runpy\nfor name in {names}:\n    runpy.run_path({str(LISTINGS)!r} + '/' + name)\n")
    words = ["--num-instances=2", "--num-replicas=4", "--ipus-per-replica=2", sys.executable, str(program)]
    together = poprun_jobs.run(*words)
    assert together.status == 0, together.stderr
    alone = [listing(name)[1].split()[-1] for name in names]
    for instance in (0, 1):
        assert [line.split()[-1] for line in together.lines_of(instance)] == alone


@pytest.mark.complete
def test_a_wider_accumulator_keeps_all_contributions(listing):
    found, _ = listing("wider_accumulator.py")
    assert found["wide"] == pytest.approx(511, rel=2**-8)  # the variable itself is bfloat16
    assert found["narrow"] == 256


def test_every_listing_is_run():
    """Other listings run in `test_keras_scripts.py`, `test_torch_documentation.py` and `test_estimator_listings.py`."""
    elsewhere = {"keras_quick_start.py", "keras_pipelined.py", "poptorch_network.py", "estimator_workers.py"}
    assert {path.name for path in LISTINGS.glob("[a-z]*.py")} == VARIABLES.keys() | elsewhere
