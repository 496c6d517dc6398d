"""`popdist.horovod`: the Horovod interface of the original system, over the real Horovod."""

import functools
import json
import sys
import tempfile
from pathlib import Path

import horovod_statements
import pytest
from horovod_installed import needs_horovod
from poprun_jobs import ROOT, start_command, start_mpirun

from popdist import LifeCycleError, NotInitializedError, horovod

LIMIT_S = 240.0
RANKS = 2
HEAD = """\
import sys
import numpy as np, popdist, pytest
from popdist import horovod as hvd
"""
BOTH = """\
def ours():
    assert popdist.allreduce(1.0) == 2.0
def both():
    ours()
    assert hvd.allreduce(1.0, hvd.Sum) == 2.0
"""
WITHOUT_HOROVOD = """\
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_S + 30)]


def python(program):
    """Run a program in a separate process, assert success without complaints, and return its output."""
    finished = start_command(sys.executable, "-W", "error", "-c", program).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    return finished.stdout


def mpirun(ranks, program):
    """Run a program on several ranks and return its result."""
    return start_mpirun(ranks, sys.executable, "-W", "error", "-c", HEAD + program).finish(LIMIT_S)


def mpirun_well(ranks, program):
    """Run a program on several ranks, assert success without complaints, and return the lines of each rank in turn."""
    finished = mpirun(ranks, program)
    assert finished.status == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    return [line for rank in range(ranks) for line in finished.lines_of(rank)]


# ---- without Horovod


def test_the_import_loads_no_heavy_module():
    heavy = {"numpy", "torch", "horovod", "mpi4py", "collectives", "ctypes"}
    assert python(f"import sys, popdist.horovod\nprint(sorted({heavy} & set(sys.modules)))") == "[]\n"


def test_a_missing_horovod_is_reported_with_the_script_that_builds_it():
    python(
        f"{WITHOUT_HOROVOD}{HEAD}from collectives import MissingBackendError\n"
        "for call in (hvd.init, hvd.mpi_built, hvd.mpi_enabled, hvd.nccl_built, hvd.gloo_enabled):\n"
        "    with pytest.raises(MissingBackendError, match='sh launch_scripts/install_horovod.sh') as caught:\n"
        "        call()\n"
        "    assert isinstance(caught.value, ImportError)\n"
        "assert not hvd.is_initialized()\n"
        "hvd.shutdown()\n"
    )


BEFORE_INIT = {
    "size": (),
    "rank": (),
    "local_size": (),
    "local_rank": (),
    "is_homogeneous": (),
    "mpi_threads_supported": (),
    "allreduce": (1.0,),
    "grouped_allreduce": ([1.0],),
    "allgather": ([1.0],),
    "broadcast": (1.0, 0),
}


@pytest.mark.parametrize("name", BEFORE_INIT)
def test_calls_before_init_are_errors(name):
    with pytest.raises(NotInitializedError) as caught:
        getattr(horovod, name)(*BEFORE_INIT[name])
    assert str(caught.value) == "Horovod has not been initialized; use hvd.init()"
    assert isinstance(caught.value, ValueError)


def test_shutdown_before_init_does_nothing():
    horovod.shutdown()
    assert not horovod.is_initialized()


def test_a_communicator_needs_popdist_init():
    with pytest.raises(LifeCycleError, match="call popdist.init first"):
        horovod.communicator()


# ---- statements for every process


@functools.cache
def failures():
    """Return for each statement the tracebacks of failing processes."""
    with tempfile.TemporaryDirectory(prefix="statements-") as folder:
        program = [sys.executable, horovod_statements.__file__, folder]
        paths = f"{ROOT}:{ROOT / 'tests' / 'collectives'}"
        job = start_mpirun(RANKS, *program, environ={"PYTHONPATH": paths, "POPDIST_TIMEOUT_S": "20"})
        finished = job.finish(LIMIT_S)
        assert (finished.status, finished.stdout) == (0, ""), finished.stderr
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [report[name] for report in reports if report[name]] for name in reports[0]}


@needs_horovod
@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("statement", horovod_statements.SUITE.statements, ids=str)
def test_statement_holds_in_every_process(statement):
    assert failures()[statement.name] == []


# ---- life cycle


@pytest.mark.complete
@needs_horovod
class TestOneProcess:
    """One process without a launcher."""

    def test_a_single_process_starts_and_ends_horovod_once(self):
        """Horovod rejects ranks that do not exist."""
        python(
            f"{HEAD}for ranks in [0, 0], [1], [-1], ['a']:\n"
            "    with pytest.raises(ValueError, match='is no group of'):\n        hvd.init(ranks)\n"
            "from mpi4py import MPI\n"
            "with pytest.raises(ValueError, match='comm is .*, which has no members'):\n    hvd.init(MPI.COMM_NULL)\n"
            "assert not hvd.is_initialized()\n"
            "hvd.init()\n"
            "assert (hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank()) == (1, 0, 1, 0)\n"
            "assert hvd.is_homogeneous() and hvd.allreduce(2.5) == 2.5\n"
            "assert hvd.allgather([1, 2]).tolist() == hvd.broadcast([1, 2], 0).tolist() == [1, 2]\n"
            "hvd.shutdown()\nhvd.shutdown()\n"
            "assert not hvd.is_initialized()\n"
            "with pytest.raises(popdist.NotInitializedError):\n    hvd.size()\n"
            "with pytest.raises(popdist.LifeCycleError, match='Horovod was shut down and cannot be started again'):\n"
            "    hvd.init()\n"
            "popdist.init()\nassert popdist.allreduce(1.0) == 1.0\n"
        )


@needs_horovod
@pytest.mark.job
@pytest.mark.cores(2)
class TestHorovodAndPopdistTogether:
    """Both may start and end in any order; the other one goes on, and the end has no complaints."""

    @pytest.mark.complete
    @pytest.mark.parametrize(
        "calls",
        [
            "hvd.init() popdist.init() both() hvd.shutdown() ours()",
            "hvd.init() popdist.init() both() popdist.finalizeBackend()",
            "hvd.init() hvd.shutdown() popdist.init() ours()",
        ],
    )
    def test_start_and_end_work_in_any_order(self, calls):
        assert mpirun_well(2, BOTH + calls.replace(" ", "\n")) == []

    @pytest.mark.complete
    def test_a_different_numbering_of_processes_is_refused(self):
        """Horovod starts second here and keeps the numbering of its communicator; nobody ends first."""
        program = (
            "popdist.init()\nrank = popdist.getInstanceIndex()\n"
            "from mpi4py import MPI\nhvd.init(MPI.COMM_WORLD.Split(0, -rank))\n"
            "print(rank, hvd.rank(), hvd.size(), hvd.allgather([rank]).tolist())\n"
            "with pytest.raises(popdist.LifeCycleError, match=f'rank {1 - rank} of 2, .* instance {rank} of 2'):\n"
            "    hvd.communicator()\n"
            "both()\n"
        )
        assert mpirun_well(2, BOTH + program) == ["0 1 2 [1, 0]", "1 0 2 [1, 0]"]

    @pytest.mark.complete
    def test_an_early_end_of_a_process_ends_the_others(self):
        program = "popdist.init()\nhvd.init()\nhvd.allreduce(1.0)\nwhile hvd.rank() == 0:\n    hvd.allreduce(1.0)\n"
        finished = mpirun(2, program)
        assert finished.status == 1
        assert "PeerLostError" in finished.stderr
        assert "Horovod has been shut down" in finished.stderr

    @pytest.mark.complete
    def test_only_the_failed_process_prints_a_traceback(self):
        program = (
            "popdist.init()\nhvd.init()\nhvd.allreduce(1.0)\n"
            "if hvd.rank() == 1:\n    raise ValueError('no such image')\n"
            "while True:\n    hvd.allreduce(1.0)\n"
        )
        finished = mpirun(2, program)
        assert finished.status == 1
        assert finished.stderr.count("Traceback") == finished.stderr.count("ValueError: no such image") == 1


@needs_horovod
@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
def test_a_subset_of_processes_is_numbered_in_the_given_order():
    program = (
        "from mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "if world.rank == 1:\n"
        "    with pytest.raises(ValueError, match='process 1 is not among .2, 0.; only these'):\n"
        "        hvd.init([2, 0])\n"
        "    sys.exit()\n"
        "hvd.init([2, 0])\nprint(world.rank, hvd.rank(), hvd.size(), hvd.allgather([world.rank]).tolist())\n"
    )
    assert mpirun_well(3, program) == ["0 1 2 [2, 0]", "2 0 2 [2, 0]"]
