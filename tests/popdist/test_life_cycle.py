"""The life cycle of the backend: `init` may be repeated; every other step comes once and in order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """\
import popdist, pytest
from popdist import EnvironmentMismatchError, LifeCycleError
"""
BACKEND = """\
import collectives

def connect(settings, instance):
    print("own backend for", instance.count, settings.mechanism)
    return collectives.connect("single", settings)
"""


def python(program, *words, **variables):
    """Run a program in a separate process and return its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + program, *words],
        env=clean | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_init_may_be_repeated():
    python(
        "assert not popdist.isBackendInitialized()\n"
        "popdist.init()\n"
        "first = popdist.communicator()\n"
        "popdist.init()\n"
        "assert popdist.isBackendInitialized() and popdist.communicator() is first\n"
        "assert (first.rank, first.size) == (0, 1)\n"
    )


@pytest.mark.complete
def test_a_strategy_initialises_popdist_only_once():
    python(
        "import strategies\n"
        "popdist.init()\n"
        "first = popdist.communicator()\n"
        "strategies.PopDistStrategy(); strategies.PopDistStrategy()\n"
        "assert popdist.communicator() is first\n"
    )


def test_the_single_steps_work_in_order():
    python(
        "popdist.registerDefaultBackend()\n"
        "assert not popdist.isBackendInitialized()\n"
        "popdist.initializeBackend()\n"
        "assert popdist.isBackendInitialized()\n"
        "popdist.init()\n"
        "popdist.finalizeBackend()\n"
        "assert not popdist.isBackendInitialized()\n"
    )


WRONG_ORDERS = [
    ("popdist.initializeBackend()", "no backend is registered; call registerDefaultBackend first"),
    ("popdist.init(); popdist.initializeBackend()", "initialised already; init may be repeated"),
    ("popdist.finalizeBackend()", "not initialised, so it cannot be finalised"),
    ("popdist.init(); popdist.finalizeBackend(); popdist.finalizeBackend()", "not initialised, so it cannot"),
    ("popdist.init(); popdist.finalizeBackend(); popdist.init()", "was finalised"),
    ("popdist.init(); popdist.registerDefaultBackend()", "a backend is in use"),
    ("popdist.init(); popdist.registerBackend(__file__)", "a backend is in use"),
    ("popdist.communicator()", "call popdist.init first"),
    ("popdist.synchronize()", "call popdist.init first"),
    ("popdist.registerCommunicator({0}, 'a')", "call popdist.init first"),
    ("popdist.allreduce(1.0)", "call popdist.init first"),
    ("popdist.init(4); popdist.init(8)", "called with num_replicas=8, but an earlier call fixed 4"),
]
IN_FORKS = """\
import json, os, sys, traceback
import collectives.backends.single
for number, program in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        try:
            exec(program, dict(globals()))
        except BaseException:
            print(number, traceback.format_exc(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
"""


def test_any_other_order_is_an_error(tmp_path):
    """Each program runs in a fork of one process."""
    backend = tmp_path / "backend.py"
    backend.write_text(BACKEND)
    programs = [
        f"__file__ = {str(backend)!r}\nwith pytest.raises(LifeCycleError, match={text!r}):\n    {calls}\n"
        for calls, text in WRONG_ORDERS
    ]
    assert python(IN_FORKS, json.dumps(programs), OPENBLAS_NUM_THREADS="1") == ""  # threads and forks do not mix


class TestNumberOfReplicas:
    def test_the_number_may_be_chosen_without_a_launcher(self):
        python(
            "popdist.init(num_replicas=6)\n"
            "assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (6, 6)\n"
            "popdist.init(); popdist.init(6)\n"
        )

    @pytest.mark.parametrize("number", [0, -2])
    def test_the_number_is_a_positive_whole_number(self, number):
        python(
            "for wrong in (2.5, '4', True):\n"
            "    with pytest.raises(TypeError, match='num_replicas is .*; give a whole number'):\n"
            "        popdist.init(wrong)\n"
            f"with pytest.raises(EnvironmentMismatchError, match='asked for {number} replicas'):\n"
            f"    popdist.init({number})\n"
            "assert not popdist.isBackendInitialized()\n"
            "popdist.init()\n"
            "assert popdist.getNumTotalReplicas() == 1\n"
        )


class TestCustomBackend:
    def test_a_file_with_connect_is_a_backend(self, tmp_path):
        backend = tmp_path / "own backend.py"
        backend.write_text(BACKEND)
        printed = python(f"popdist.registerBackend({str(backend)!r})\npopdist.init()\npopdist.synchronize()\n")
        assert printed == "own backend for 1 auto\n"

    def test_a_backend_may_be_given_as_a_path_and_replaced_before_init(self, tmp_path):
        backend = tmp_path / "backend.py"
        backend.write_text(BACKEND)
        printed = python(
            "from pathlib import Path\n"
            f"popdist.registerBackend(Path({str(backend)!r}))\n"
            "popdist.registerDefaultBackend()\n"
            "popdist.init()\n"
        )
        assert printed == ""

    def test_a_missing_file_is_refused(self, tmp_path):
        missing = str(tmp_path / "none.py")
        python(f"with pytest.raises(LifeCycleError, match='none.py'):\n    popdist.registerBackend({missing!r})\n")

    @pytest.mark.parametrize(("name", "text"), [("empty.py", ""), ("other.py", "connect = 3\n")])
    def test_a_file_without_connect_is_refused(self, tmp_path, name, text):
        file = tmp_path / name
        file.write_text(text)
        python(
            "with pytest.raises(LifeCycleError, match='does not define connect'):\n"
            f"    popdist.registerBackend({str(file)!r})\n"
        )

    def test_a_file_that_is_not_python_is_refused(self, tmp_path):
        file = tmp_path / "library.so.1"
        file.write_bytes(b"\x7fELF")
        python(
            "with pytest.raises(LifeCycleError, match='not a Python file'):\n"
            f"    popdist.registerBackend({str(file)!r})\n"
        )


def test_the_import_loads_no_heavy_package():
    printed = python("import sys\nprint(sorted({'numpy', 'jax', 'mpi4py', 'collectives'} & set(sys.modules)))\n")
    assert printed == "[]\n"
