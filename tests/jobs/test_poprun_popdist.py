"""Failures of programs that use popdist: collectives are named, and the first cause is blamed."""

from __future__ import annotations

import signal
import sys
from functools import partial

import pytest
from poprun_jobs import start, start_mpirun, two
from tiers import also

from popdist.instance import this_host

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(240)]

RAISES = "raise ValueError('no such data')"
HEAD = """\
import os, signal, sys
import numpy as np
import popdist

popdist.init()
gradients = np.ones(1000, np.float32)
popdist.synchronize()
print("ready", flush=True)
if popdist.getInstanceIndex() == 1:
    {event}
for step in range(2):
    popdist.communicator().all_reduce(gradients, "sum")
"""


@pytest.mark.parametrize(
    ("event", "status", "how"),
    [
        (RAISES, 1, "ended with exit status 1"),
        also("sys.exit(3)", 3, "ended with exit status 3"),
        also("raise SystemExit(4)", 4, "ended with exit status 4"),
        also("os._exit(5)", 5, "ended with exit status 5"),
        also("sys.exit(0)", 1, "ended with exit status 0 too early: instance 0 still needed it"),
        also("os._exit(0)", 1, "ended with exit status 0 too early: instance 0 still needed it"),
        also("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_an_instance_that_leaves_while_the_other_needs_it_is_blamed(event, status, how):
    job = start(*two(HEAD.format(event=event)))
    job.wait_for("ready")
    finished = job.finish()
    assert finished.status == status, finished.stderr
    assert finished.own_lines[0].startswith("instance 1 on host ")
    assert how in finished.own_lines[0]
    # A barrier releases one instance before the other, which may be between the barrier and the all-reduce.
    waiting = ("instance 0 was in collective 2, all_reduce", "instance 0 was in collective 1, barrier")
    _, *others = finished.own_lines
    if event == RAISES:
        assert (
            others.pop() == f"first cause: instance 1 on host {this_host()}: ValueError: no such data (exit status 1)"
        )
    assert [line.startswith(waiting) for line in others] in ([True], [])
    assert finished.stderr.splitlines()[-1].endswith(finished.own_lines[-1])


THREADS = """\
import sys, threading
import popdist

def show(kind, error, trace):
    print("hook of the program", kind.__name__, file=sys.stderr)
    sys.__excepthook__(kind, error, trace)

sys.excepthook = show
popdist.init()
popdist.synchronize()
if popdist.getInstanceIndex() == 1:
    threading.Thread(target=threading.Event().wait, name="loader").start()
    {event}
popdist.synchronize()
"""


@pytest.mark.parametrize(
    ("event", "status", "text"), [("raise ValueError('no such data')", 1, "no such data"), also("sys.exit(3)", 3, "")]
)
def test_an_endless_thread_does_not_keep_a_failed_instance_alive(event, status, text):
    """The instance ends long before --stuck-timeout-s, which is 300 s."""
    finished = start(*two(THREADS.format(event=event))).finish()
    assert finished.status == status, finished.stderr
    assert finished.own_lines[0].startswith("instance 1 on host ")
    assert f"ended with exit status {status}" in finished.own_lines[0]
    assert text in finished.stderr
    assert ("hook of the program ValueError" in finished.stderr) == bool(text)
    assert "without waiting more than THREADS_GRACE_S = 1 s for threads: loader" in finished.stderr


ENDS_EARLY = """\
import os, signal, sys
import numpy as np
import popdist, popdist.failing
popdist.failing.CAUSE_FIRST_S = {patience_s}
popdist.init()
popdist.synchronize()
if popdist.getInstanceIndex() == 1:
    {event}
popdist.allreduce(np.ones(3))
"""


LEFT_OUT = "import popdist\nfor _ in range(2): popdist.init()\npopdist.synchronize()\n"


@pytest.mark.parametrize(
    ("start_two", "way_out"),
    [(partial(start, "-n", "2"), "poprun --num-replicas 2"), (partial(start_mpirun, 2), "popdist.init(2)")],
    ids=["poprun", "mpirun"],
)
def test_a_job_whose_number_of_replicas_was_left_out_says_so_once(start_two, way_out):
    finished = start_two(sys.executable, "-c", LEFT_OUT).finish()
    assert finished.status == 0, finished.stderr
    [line] = finished.stderr.splitlines()
    assert "R = 2: one replica for each of 2 instances, because " in line
    assert line.endswith(f" fix R with {way_out}")


def test_the_message_of_the_failed_instance_is_not_buried_under_consequences():
    """The others could only say that the instance has ended. (Only `raise` does not reveal the failure.)"""
    event = "raise SystemExit('this needs an extra: pip install it')"
    program = ENDS_EARLY.format(event=event, patience_s=60)  # enough for a busy machine
    words = ("--num-instances", "3", "--num-replicas", "3", sys.executable, "-c", program)
    finished = start(*words).finish()
    assert finished.status == 1
    assert finished.own_lines[0].startswith("instance 1 on host ")
    assert finished.own_lines[-1].endswith(" (exit status 1), which wrote last: this needs an extra: pip install it")
    first, *rest = [line for line in finished.stderr.splitlines() if " POPRUN [W] " not in line]  # too few cores
    assert first == "[1,1]<stderr>:this needs an extra: pip install it"
    assert [line.partition(" POPRUN [E] ")[2] for line in rest] == finished.own_lines


@pytest.mark.complete
def test_consequences_are_shown_when_the_failed_instance_stays_alive():
    event = """
    try:
        popdist.finalizeBackend()
    except Exception:
        signal.pause()
"""
    finished = start(*two(ENDS_EARLY.format(event=event, patience_s=3))).finish()
    assert finished.status == 1
    assert "LayoutMismatchError: " in finished.stderr
    assert "see why rank 1 came to the end" in finished.stderr


def test_instances_of_a_job_started_with_popdist_alone_are_not_alone():
    program = "import popdist\npopdist.init()\nprint(popdist.getNumInstances())\n"
    finished = start(*two(program), environ={"POPDIST_ALONE": "1"}).finish()
    assert [finished.lines_of(instance) for instance in range(2)] == [["2"], ["2"]]


def test_an_instance_s_child_that_uses_popdist_is_refused_and_does_not_hang():
    program = (
        "import os, subprocess, sys\nimport popdist\npopdist.init()\n"
        "child = 'import popdist; popdist.init(); print(popdist.getNumInstances())'\n"
        "for more in ({}, {'POPDIST_ALONE': '1'}):\n"
        "    words = [sys.executable, '-c', child]\n"
        "    done = subprocess.run(words, env=os.environ | more, capture_output=True, text=True)\n"
        "    print(done.returncode, done.stdout.strip(), 'and has started this one' in done.stderr)\n"
    )
    finished = start(*two(program)).finish()
    assert [finished.lines_of(instance) for instance in range(2)] == [["1  True", "0 1 False"]] * 2
