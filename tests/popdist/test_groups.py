"""Groups of instances, and jobs of plain mpirun that lose an instance."""

import functools
import subprocess

import pytest
from many_checks import LIMIT_S, Checks, command, environment

HEAD = """\
import os, sys
import numpy as np
import popdist, pytest
import collectives
popdist.init()
index, count = popdist.getInstanceIndex(), popdist.getNumInstances()
everybody = popdist.communicator()
"""

job = pytest.mark.job
pytestmark = pytest.mark.timeout(LIMIT_S + 20)

# This job has no launcher; it runs in a separate process because `init` cannot be undone.
ALONE = {
    "runs what is meant for it": ("assert popdist.execute_on_instances({0}, lambda a, b=0: a + b, 1, b=2) == 3\n"),
    "waits for nobody": ("popdist.synchronize()\npopdist.execute_on_instances([0], popdist.synchronize)\n"),
    "others do not exist": (
        "for instances in (set(), {1}, {-1}, {0, 1}):\n"
        "    with pytest.raises(ValueError, match='name some of 0 to 0'):\n"
        "        popdist.execute_on_instances(instances, lambda: None)\n"
        "    with pytest.raises(ValueError, match='name some of 0 to 0'):\n"
        "        popdist.registerCommunicator(instances, 'none')\n"
        "for instances in (0, {0.5}, ['a'], None):\n"
        "    with pytest.raises(TypeError, match='not a set of whole numbers; name them as'):\n"
        "        popdist.execute_on_instances(instances, lambda: None)\n"
    ),
    "the default group is that of all": (
        "assert popdist.allreduce(2.0, communicator_id=popdist.defaultCommunicatorId()) == 2.0\n"
    ),
    "an unknown group lists the known": (
        "popdist.registerCommunicator({0}, 'mine')\n"
        "with pytest.raises(ValueError, match=\"'other'; use one of default, mine\"):\n"
        "    popdist.allreduce(1.0, communicator_id='other')\n"
    ),
    "exceptions come through": (
        "with pytest.raises(ZeroDivisionError):\n"
        "    popdist.execute_on_instances({0}, lambda: 1 / 0)\n"
        "popdist.synchronize()\n"
    ),
}

TWO = {
    "an unknown id lists the known": (
        "popdist.registerCommunicator({0, 1}, 'both')\n"
        "with pytest.raises(ValueError, match=\"'other'; use one of both, default\"):\n"
        "    popdist.allgather(1.0, communicator_id='other')\n"
    ),
    # Instance 1 answers a message that instance 0 waits for inside.
    "the others go on at once": (
        "from mpi4py import MPI\n"
        "if index == 0:\n"
        "    assert popdist.execute_on_instances({0}, lambda: MPI.COMM_WORLD.recv(source=1)) == 'hello'\n"
        "else:\n"
        "    popdist.execute_on_instances({0}, lambda: None)\n"
        "    MPI.COMM_WORLD.send('hello', 0)\n"
    ),
    "an exception ends the group": (
        "def fails():\n    raise KeyError('mine')\n"
        "for _ in range(2):\n"
        "    if index == 0:\n"
        "        with pytest.raises(KeyError):\n"
        "            popdist.execute_on_instances({0}, fails)\n"
        "    assert popdist.communicator() is everybody\n"
        "    popdist.synchronize()\n"
    ),
    "may be repeated often": (
        "for number in range(200):\n"
        "    total = popdist.execute_on_instances({number % 2, 1}, popdist.allreduce, np.int32(number))\n"
        "    wanted = {0: 2 * number, 1: number}[number % 2]\n"
        "    assert total is None or total == wanted\n"
    ),
    "who is not a member may not use it": (
        "popdist.registerCommunicator({1}, 'one')\n"
        "if index == 0:\n"
        "    with pytest.raises(popdist.LifeCycleError, match=\"instance 0 is not in the group 'one'\"):\n"
        "        popdist.allreduce(1.0, communicator_id='one')\n"
    ),
    "gives the result to the named and none to the others": (
        "assert popdist.execute_on_instances({1}, lambda a: a + index, 5) == (6 if index == 1 else None)\n"
    ),
    "all have to agree on the members": (
        "with pytest.raises(collectives.LayoutMismatchError, match='registerCommunicator'):\n"
        "    popdist.registerCommunicator({0, 1} if index else {0}, 'a')\n"
        "popdist.synchronize()\n"
    ),
    "all have to agree on the name": (
        "with pytest.raises(collectives.LayoutMismatchError, match='registerCommunicator'):\n"
        "    popdist.registerCommunicator({0, 1}, 'a' if index else 'b')\n"
        "popdist.synchronize()\n"
    ),
}

THREE = {
    "gives the result to the named and none to the others": (
        "assert popdist.execute_on_instances({1}, lambda a: a + index, 5) == (6 if index == 1 else None)\n"
    ),
    "collectives inside concern only the named": (
        "def inside():\n"
        "    assert (popdist.communicator().size, popdist.communicator().rank) == (2, index // 2)\n"
        "    popdist.synchronize()\n"
        "    total = popdist.allreduce(np.float32(index))\n"
        "    root = popdist.broadcast(np.int32(index), root_rank=1)\n"
        "    named = popdist.allgather(np.int32(index), tensor_name='x')\n"
        "    return float(total), int(root), named.tolist()\n"
        "found = popdist.execute_on_instances({2, 0}, inside)\n"
        "assert found == (None if index == 1 else (2.0, 2, [0, 2])), found\n"
        "assert popdist.communicator() is everybody\n"
        "assert float(popdist.allreduce(np.float32(1))) == 3.0\n"
    ),
    "the others need not call it": (
        "if index:\n    popdist.execute_on_instances([1, 2], popdist.synchronize)\npopdist.synchronize()\n"
    ),
    "may be nested": (
        "def inner():\n    return popdist.communicator().size\n"
        "def outer():\n"
        "    nested = popdist.execute_on_instances({2}, inner)\n"
        "    assert popdist.communicator().size == 2\n"
        "    return nested\n"
        "assert popdist.execute_on_instances({1, 2}, outer) == (1 if index == 2 else None)\n"
        "assert popdist.communicator().size == 3\n"
    ),
    "the members reduce among themselves": (
        "popdist.registerCommunicator({0, 2}, 'ends')\n"
        "popdist.registerCommunicator({1, 2}, 'last')\n"
        "if index != 1:\n"
        "    assert popdist.allgather(np.int8(index), communicator_id='ends').tolist() == [0, 2]\n"
        "if index != 0:\n"
        "    assert popdist.allreduce(np.int8(index), communicator_id='last') == 3\n"
        "    assert popdist.broadcast(np.int8(index), 1, communicator_id='last') == 2\n"
        "assert popdist.allreduce(np.int32(1)) == 3\n"
    ),
    "the default id stands for the group that was given it": (
        "popdist.registerCommunicator({0, 1})\n"
        "if index < 2:\n"
        "    assert popdist.allgather(np.int32(index)).tolist() == [0, 1]\n"
        "    popdist.synchronize()\n"
        "assert popdist.allreduce(1, communicator_id='default') == 2 if index < 2 else True\n"
    ),
}

PROGRAMS = {1: ALONE, 2: TWO, 3: THREE}


@functools.cache
def checks(count):
    return Checks(count, HEAD, PROGRAMS[count])


@pytest.mark.parametrize("name", ALONE)
def test_statements_hold_for_one_instance(name):
    checks(1).holds(name)


@job
@pytest.mark.cores(2)
@pytest.mark.parametrize("name", TWO)
def test_statements_hold_for_two_instances(name):
    checks(2).holds(name)


@job
@pytest.mark.cores(2)
@pytest.mark.parametrize("name", THREE)
def test_statements_hold_for_three_instances(name):
    checks(3).holds(name)


@job
@pytest.mark.cores(2)
@pytest.mark.parametrize("count", PROGRAMS)
def test_jobs_end_well(count):
    checks(count).end_well()


def mpirun(count, program):
    """Run a program as `count` instances of plain mpirun; return status and errors. Instances wait 600 s for each
    other.
    """
    finished = subprocess.run(
        [*command(count), "-c", HEAD + program], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    return finished.returncode, finished.stderr


@job
@pytest.mark.cores(2)
class TestLeaving:
    """A job of plain mpirun ends soon, and with an error, if one instance leaves."""

    WAIT = "popdist.synchronize()\n"

    @pytest.mark.parametrize(
        ("leave", "status"),
        [
            ("sys.exit(3)", 3),
            *(
                pytest.param(leave, status, marks=pytest.mark.complete)
                for leave, status in (
                    ("raise ValueError('no such data')", 1),
                    ("sys.exit('bad input')", 1),
                    ("os._exit(4)", 4),
                    ("raise KeyboardInterrupt", None),
                )
            ),
        ],
    )
    def test_a_failed_instance_ends_the_job_with_its_status(self, leave, status):
        found, errors = mpirun(3, f"if index == 2:\n    {leave}\n{self.WAIT}")
        assert found == status or (status is None and found != 0), errors

    @pytest.mark.parametrize(
        "leave",
        [
            "os._exit(0)",
            *(pytest.param(how, marks=pytest.mark.complete) for how in ("sys.exit(0)", "raise SystemExit")),
        ],
    )
    def test_an_early_exit_with_status_0_ends_the_job_with_an_error(self, leave):
        found, errors = mpirun(2, f"if index == 0:\n    {leave}\n{self.WAIT}")
        assert found != 0, errors

    def test_the_reason_is_printed_once(self):
        status, errors = mpirun(2, f"if index == 1:\n    raise ValueError('no such data')\n{self.WAIT}")
        assert status == 1, errors
        assert errors.count("ValueError: no such data") == 1

    @pytest.mark.complete
    def test_a_joint_end_is_a_success(self):
        assert mpirun(3, "popdist.synchronize()\n")[0] == 0

    @pytest.mark.complete
    def test_separate_ends_are_a_success_if_no_instance_is_needed(self):
        assert mpirun(2, "if index: sum(range(10**7))\n")[0] == 0

    @pytest.mark.complete
    def test_an_explicit_end_before_the_exit_is_a_success(self):
        assert mpirun(2, "popdist.finalizeBackend()\nassert not popdist.isBackendInitialized()\n")[0] == 0

    @pytest.mark.complete
    def test_a_handled_exception_is_not_a_failure(self):
        program = "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\npopdist.synchronize()\n"
        assert mpirun(2, program)[0] == 0
