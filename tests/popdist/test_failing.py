"""The end of a failed process despite its other threads; a process that has not failed waits for them as usual."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """\
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from popdist.failing import LastThreads
last_threads = LastThreads(lambda: HAS_FAILED, lambda: print("abandoned"))
may_end = threading.Event()
atexit.register(print, "exit handlers")
atexit.register(may_end.set)
"""
WAITS_FOR_EVER = ("threading.Thread(target=may_end.wait, name='loader').start()", "loader")
IN_A_POOL = ("ThreadPoolExecutor(1, 'pool').submit(may_end.wait)", "pool_0")
IDLE_IN_A_POOL = "ThreadPoolExecutor(1).submit(print, 'done').result()"
DAEMON = "threading.Thread(target=may_end.wait, daemon=True).start()"
OF_THE_PROGRAM = "threading.Thread(target=threading.main_thread().join).start()"


def run(*lines, has_failed=True):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD.replace("HAS_FAILED", str(has_failed)) + "\n".join(lines)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("thread", [WAITS_FOR_EVER, IN_A_POOL])
def test_an_endless_thread_is_named_and_ends_with_the_failed_process(thread):
    start, name = thread
    done = run(start, "last_threads.watch(3)", "print('output that nobody has flushed')")
    assert (done.returncode, done.stdout) == (3, "output that nobody has flushed\nabandoned\n")
    assert done.stderr == (
        "the program has failed; it ends without waiting more than THREADS_GRACE_S = 1 s for threads: " + name + "\n"
    )


@pytest.mark.parametrize("thread", [IDLE_IN_A_POOL, DAEMON, OF_THE_PROGRAM])
def test_python_ends_as_usual_if_all_threads_end(thread):
    patience = "sys.modules[LastThreads.__module__].THREADS_GRACE_S = 50"  # enough for a busy machine
    done = run(patience, thread, "last_threads.watch(3)", "raise ValueError('as ever')")
    assert done.returncode == 1
    assert done.stdout.endswith("exit handlers\n")
    assert "abandoned" not in done.stdout
    assert done.stderr.endswith("ValueError: as ever\n")


def test_a_program_that_recovered_waits_for_its_threads():
    """The program caught its exit, for example, and went on."""
    waits = "threading.Thread(target=lambda: (may_end.wait(1.5 * THREADS_GRACE_S), print('waited'))).start()"
    done = run("from popdist.failing import THREADS_GRACE_S", waits, "last_threads.watch(3)", has_failed=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "waited\nexit handlers\n", "")
