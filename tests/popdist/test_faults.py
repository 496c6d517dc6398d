from __future__ import annotations

import subprocess
import sys

import pytest

from popdist.records import NoProgress
from popdist.records.faults import Fault, FaultyProgress, InjectedError, parse_fault, with_faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:instance=2", Fault("kill", 2)),
        ("kill:instance=2,step=7,phase=all_reduce", Fault("kill", 2, "all_reduce", 7)),
        ("delay:instance=0,seconds=0.5,attempt=1", Fault("delay", 0, attempt=1, seconds=0.5)),
    ],
)
def test_a_fault_is_read(text, fault):
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("melt:instance=0", "'melt' is not a kind of fault; use one of kill, exit, raise, stop, delay, cut, flip-bit"),
        ("", "'' is not a kind of fault"),
        ("kill", "no instance is named; write KIND:instance=I"),
        ("kill:step=1", "no instance is named"),
        ("kill:instance=x", "instance=x is not a whole number"),
        ("kill:instance=-1", "instance=-1 is not a whole number"),
        ("kill:instance=0,step=1.5", "step=1.5 is not a whole number"),
        ("kill:instance=0,phase=lunch", "'lunch' is not a phase; use one of data, forward, all_reduce"),
        ("flip-bit:instance=0,phase=update", "its phase is forward and not update"),
        ("kill:instance=0,colour=red", "'colour' is not understood"),
        ("kill:instance=0,instance=1", "instance= is given twice"),
        ("stop:instance=0,seconds=5", "seconds= is how long a delay takes, and this is stop"),
        ("delay:instance=0,seconds=nan", "seconds=nan is not a number of seconds"),
        ("delay:instance=0,seconds=-1", "seconds=-1 is not a number of seconds"),
    ],
)
def test_what_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


class Notes(NoProgress):
    def __init__(self):
        self.taken = []

    def enter(self, number, label):
        self.taken.append(label)

    def step(self, number):
        self.taken.append(number)


def happens(fault: str, note) -> bool:
    """Whether a note lets a `raise` happen; it reaches the record in any case."""
    notes = Notes()
    try:
        note(FaultyProgress(notes, [parse_fault(f"raise:instance=0{fault}")]))
    except InjectedError:
        assert notes.taken
        return True
    return False


def train(progress, step, label=b"ordered_all_reduce 'gradients'"):
    progress.step(step)
    progress.enter(5, label)
    progress.leave()


@pytest.mark.parametrize(
    ("fault", "step", "expected"),
    [
        ("", 0, True),
        (",step=7", 7, True),
        (",step=7", 6, False),
        (",phase=all_reduce", 3, True),
        (",phase=all_reduce,step=2", 3, False),
        (",phase=broadcast", 3, False),
        (",phase=update,step=3", 3, True),
    ],
)
def test_it_happens_in_its_step_and_phase(fault, step, expected):
    assert happens(fault, lambda progress: train(progress, step)) == expected


def test_it_happens_before_the_first_step_too():
    assert happens(",phase=broadcast", lambda progress: progress.enter(1, b"broadcast 'variables'"))
    assert not happens(",phase=update", lambda progress: progress.leave())


def test_it_happens_while_a_collective_waits():
    def wait(progress):
        progress.enter(1, b"barrier")
        progress.waiting_for([1])

    assert happens(",phase=waiting", wait)


@pytest.mark.parametrize(("phase", "step"), [("data", 3), ("checkpoint", 2)])
def test_it_happens_in_what_else_begins(phase, step):
    """Data are read for the step that comes next."""

    def begin(progress):
        progress.step(2)
        progress.begin("data")
        progress.begin("checkpoint")

    assert happens(f",phase={phase}", begin)
    assert happens(f",phase={phase},step={step}", begin)
    assert not happens(f",phase={phase},step={5 - step}", begin)


def test_a_bit_is_flipped_once():
    progress = FaultyProgress(NoProgress(), [Fault("flip-bit", 0, step=2)])
    flips = []
    for step in (1, 2, 2, 3):
        progress.step(step)
        flips.append(progress.flips_bit)
    assert flips == [False, True, False, False]


def test_it_happens_once():
    progress = FaultyProgress(NoProgress(), [Fault("raise", 0)])
    with pytest.raises(InjectedError, match="injected into instance 0 in phase forward"):
        progress.step(0)
    train(progress, 0)


def test_only_those_of_this_attempt_and_instance_are_due():
    notes = NoProgress()
    environ = {"POPDIST_INJECT": "raise:instance=0,attempt=1;kill:instance=0"}
    assert with_faults(notes, {}, 0) is notes
    assert with_faults(notes, {"POPDIST_INJECT": "raise:instance=0,attempt=1"}, 0) is notes
    assert with_faults(notes, environ, 1) is notes
    with pytest.raises(InjectedError):
        with_faults(notes, environ | {"POPDIST_RESTART_COUNT": "1"}, 0).step(0)


BREAKS_CONNECTIONS = """
import os, socket, sys
from popdist.records.faults import Fault, FaultyProgress
from popdist.records import NoProgress
listening = socket.create_server(("127.0.0.1", 0))
one, inside = socket.create_connection(listening.getsockname()), socket.socketpair()
other = listening.accept()[0]
reader, writer = os.pipe()
FaultyProgress(NoProgress(), [Fault("cut", 0)]).step(0)
print(one.recv(1), other.recv(1))
inside[0].send(b"local")
os.close(writer)
print(inside[1].recv(9), os.read(reader, 9))
socket.create_connection(listening.getsockname())
"""


def test_all_connections_over_tcp_break_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", BREAKS_CONNECTIONS], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout == "b'' b''\nb'local' b''\n"
    assert done.stderr.splitlines()[-1].startswith("ConnectionRefusedError")
