"""Groups of instances, and what becomes of a job of plain mpirun when one of them leaves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """\
import os, sys
import numpy as np
import popdist, pytest
import collectives
popdist.init()
index, count = popdist.getInstanceIndex(), popdist.getNumInstances()
everybody = popdist.communicator()
"""

LIMIT_S = 100

job = pytest.mark.job
pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def mpirun(count, program):
    """Run a program as `count` instances of plain mpirun: status, output, errors; they wait 600 s for each other."""
    words = [shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun"), "--oversubscribe"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    finished = subprocess.run(
        [*words, "-np", str(count), sys.executable, "-W", "error", "-c", HEAD + program],
        env=clean | allowed | {"PYTHONPATH": str(ROOT), "OMPI_MCA_mpi_yield_when_idle": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return finished.returncode, finished.stdout, finished.stderr


def check(count, program):
    """The program ends well on all instances."""
    status, _, errors = mpirun(count, program)
    assert status == 0, errors


class TestOneInstance:
    """Without a launcher; in a process of its own, because `init` is for good."""

    @staticmethod
    def check(program):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
        words = [sys.executable, "-W", "error", "-c", HEAD + program]
        finished = subprocess.run(
            words, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert finished.returncode == 0, finished.stderr

    def test_runs_what_is_meant_for_it(self):
        self.check("assert popdist.execute_on_instances({0}, lambda a, b=0: a + b, 1, b=2) == 3\n")

    def test_waits_for_nobody(self):
        self.check("popdist.synchronize()\npopdist.execute_on_instances([0], popdist.synchronize)\n")

    def test_others_do_not_exist(self):
        self.check(
            "for instances in (set(), {1}, {-1}, {0, 1}):\n"
            "    with pytest.raises(ValueError, match='name some of 0 to 0'):\n"
            "        popdist.execute_on_instances(instances, lambda: None)\n"
            "    with pytest.raises(ValueError, match='name some of 0 to 0'):\n"
            "        popdist.registerCommunicator(instances, 'none')\n"
            "for instances in (0, {0.5}, ['a'], None):\n"
            "    with pytest.raises(TypeError, match='not a set of whole numbers; name them as'):\n"
            "        popdist.execute_on_instances(instances, lambda: None)\n"
        )

    def test_the_default_group_is_that_of_all(self):
        self.check("assert popdist.allreduce(2.0, communicator_id=popdist.defaultCommunicatorId()) == 2.0\n")

    def test_an_unknown_group_lists_the_known(self):
        self.check(
            "popdist.registerCommunicator({0}, 'mine')\n"
            "with pytest.raises(ValueError, match=\"'other'; known are default, mine\"):\n"
            "    popdist.allreduce(1.0, communicator_id='other')\n"
        )

    def test_exceptions_come_through(self):
        self.check(
            "with pytest.raises(ZeroDivisionError):\n"
            "    popdist.execute_on_instances({0}, lambda: 1 / 0)\n"
            "popdist.synchronize()\n"
        )


@job
class TestExecuteOnInstances:
    @pytest.mark.parametrize("count", [2, 3])
    def test_gives_the_result_to_the_named_and_none_to_the_others(self, count):
        check(
            count, "assert popdist.execute_on_instances({1}, lambda a: a + index, 5) == (6 if index == 1 else None)\n"
        )

    def test_collectives_inside_concern_only_the_named(self):
        check(
            3,
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
            "assert float(popdist.allreduce(np.float32(1))) == 3.0\n",
        )

    def test_the_others_go_on_at_once(self):
        """Instance 1 answers a message that instance 0 waits for inside."""
        check(
            2,
            "from mpi4py import MPI\n"
            "if index == 0:\n"
            "    assert popdist.execute_on_instances({0}, lambda: MPI.COMM_WORLD.recv(source=1)) == 'hello'\n"
            "else:\n"
            "    popdist.execute_on_instances({0}, lambda: None)\n"
            "    MPI.COMM_WORLD.send('hello', 0)\n",
        )

    def test_the_others_need_not_call_it(self):
        check(3, "if index:\n    popdist.execute_on_instances([1, 2], popdist.synchronize)\npopdist.synchronize()\n")

    def test_may_be_nested(self):
        check(
            3,
            "def inner():\n    return popdist.communicator().size\n"
            "def outer():\n"
            "    nested = popdist.execute_on_instances({2}, inner)\n"
            "    assert popdist.communicator().size == 2\n"
            "    return nested\n"
            "assert popdist.execute_on_instances({1, 2}, outer) == (1 if index == 2 else None)\n"
            "assert popdist.communicator().size == 3\n",
        )

    def test_an_exception_ends_the_group(self):
        check(
            2,
            "def fails():\n    raise KeyError('mine')\n"
            "for _ in range(2):\n"
            "    if index == 0:\n"
            "        with pytest.raises(KeyError):\n"
            "            popdist.execute_on_instances({0}, fails)\n"
            "    assert popdist.communicator() is everybody\n"
            "    popdist.synchronize()\n",
        )

    def test_may_be_repeated_often(self):
        check(
            2,
            "for number in range(200):\n"
            "    total = popdist.execute_on_instances({number % 2, 1}, popdist.allreduce, np.int32(number))\n"
            "    wanted = {0: 2 * number, 1: number}[number % 2]\n"
            "    assert total is None or total == wanted\n",
        )


@job
class TestRegisterCommunicator:
    def test_the_members_reduce_among_themselves(self):
        check(
            3,
            "popdist.registerCommunicator({0, 2}, 'ends')\n"
            "popdist.registerCommunicator({1, 2}, 'last')\n"
            "if index != 1:\n"
            "    assert popdist.allgather(np.int8(index), communicator_id='ends').tolist() == [0, 2]\n"
            "if index != 0:\n"
            "    assert popdist.allreduce(np.int8(index), communicator_id='last') == 3\n"
            "    assert popdist.broadcast(np.int8(index), 1, communicator_id='last') == 2\n"
            "assert popdist.allreduce(np.int32(1)) == 3\n",
        )

    def test_who_is_not_a_member_may_not_use_it(self):
        check(
            2,
            "popdist.registerCommunicator({1}, 'one')\n"
            "if index == 0:\n"
            "    with pytest.raises(popdist.LifeCycleError, match=\"instance 0 is not in the group 'one'\"):\n"
            "        popdist.allreduce(1.0, communicator_id='one')\n",
        )

    def test_an_unknown_id_lists_the_known(self):
        check(
            2,
            "popdist.registerCommunicator({0, 1}, 'both')\n"
            "with pytest.raises(ValueError, match=\"'other'; known are both, default\"):\n"
            "    popdist.allgather(1.0, communicator_id='other')\n",
        )

    @pytest.mark.parametrize("call", ["({0, 1} if index else {0}, 'a')", "({0, 1}, 'a' if index else 'b')"])
    def test_all_have_to_agree(self, call):
        check(
            2,
            "with pytest.raises(collectives.LayoutMismatchError, match='registerCommunicator'):\n"
            f"    popdist.registerCommunicator{call}\n"
            "popdist.synchronize()\n",
        )

    def test_the_default_id_stands_for_the_group_that_was_given_it(self):
        check(
            3,
            "popdist.registerCommunicator({0, 1})\n"
            "if index < 2:\n"
            "    assert popdist.allgather(np.int32(index)).tolist() == [0, 1]\n"
            "    popdist.synchronize()\n"
            "assert popdist.allreduce(1, communicator_id='default') == 2 if index < 2 else True\n",
        )


@job
class TestLeaving:
    """Plain mpirun: a job of which one instance leaves ends soon, and badly."""

    WAIT = "popdist.synchronize()\n"

    @pytest.mark.parametrize(
        ("leave", "status"),
        [
            ("sys.exit(3)", 3),
            ("raise ValueError('no such data')", 1),
            ("sys.exit('bad input')", 1),
            ("os._exit(4)", 4),
            ("raise KeyboardInterrupt", None),
        ],
    )
    def test_with_a_failure(self, leave, status):
        found, _, errors = mpirun(3, f"if index == 2:\n    {leave}\n{self.WAIT}")
        assert found == status or (status is None and found != 0), errors

    @pytest.mark.parametrize("leave", ["sys.exit(0)", "raise SystemExit", "os._exit(0)"])
    def test_too_early_with_status_0(self, leave):
        found, _, errors = mpirun(2, f"if index == 0:\n    {leave}\n{self.WAIT}")
        assert found != 0, errors

    def test_the_reason_is_printed_once(self):
        _, _, errors = mpirun(2, f"if index == 1:\n    raise ValueError('no such data')\n{self.WAIT}")
        assert errors.count("ValueError: no such data") == 1

    def test_together_is_a_good_end(self):
        assert mpirun(3, "popdist.synchronize()\n")[0] == 0

    def test_at_different_times_is_a_good_end_when_nobody_is_needed(self):
        assert mpirun(2, "if index: sum(range(10**7))\n")[0] == 0

    def test_explicitly_and_then_at_exit_is_a_good_end(self):
        assert mpirun(2, "popdist.finalizeBackend()\nassert not popdist.isBackendInitialized()\n")[0] == 0

    def test_an_exception_that_was_handled_is_none(self):
        program = "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\npopdist.synchronize()\n"
        assert mpirun(2, program)[0] == 0
