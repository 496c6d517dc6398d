from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from collectives.calls import Call
from collectives.instruments import CHECKPOINT, DATA, PHASES, UPDATE, Instruments
from popdist.records import faults
from popdist.records.faults import Fault, FaultInjector, InjectedError, due_faults, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:instance=2", Fault("kill", 2)),
        ("kill:instance=2,step=7,phase=all_reduce", Fault("kill", 2, "all_reduce", 7)),
        ("delay:instance=0,seconds=0.5,attempt=1", Fault("delay", 0, attempt=1, seconds=0.5)),
    ],
)
def test_a_fault_is_parsed(text, fault):
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
        ("stop:instance=0,seconds=5", "seconds= is the duration of a delay, but this fault is stop"),
        ("delay:instance=0,seconds=nan", "seconds=nan is not a number of seconds"),
        ("delay:instance=0,seconds=-1", "seconds=-1 is not a number of seconds"),
    ],
)
def test_an_invalid_fault_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


class Notes:
    def __init__(self):
        self.taken = []

    def operation_begins(self, number, call):
        self.taken.append(call.label)

    def step_begins(self, step):
        self.taken.append(step)


def happens(fault: str, note) -> bool:
    """Return whether the events of `note` trigger a `raise`; other instruments see the events in any case."""
    notes = Notes()
    try:
        note(Instruments(notes, FaultInjector([parse_fault(f"raise:instance=0{fault}")])))
    except InjectedError:
        assert notes.taken
        return True
    return False


def train(instruments, step, operation="ordered_all_reduce"):
    """Run a step whose update has a name that no collective has."""
    instruments.step_begins(step)
    instruments.operation_begins(5, Call(operation, "gradients"))
    instruments.operation_ends()
    with instruments.during[UPDATE]:
        pass


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
def test_a_fault_happens_in_its_step_and_phase(fault, step, expected):
    assert happens(fault, lambda instruments: train(instruments, step)) == expected


@pytest.mark.parametrize("operation", ["all_reduce", "ordered_all_reduce", "grouped_ordered_all_reduce"])
def test_a_phase_covers_all_variants_of_a_collective(operation):
    assert happens(",phase=all_reduce", lambda instruments: train(instruments, 3, operation))
    assert not happens(",phase=reduce_scatter", lambda instruments: train(instruments, 3, operation))


def test_the_name_of_a_tensor_is_not_a_phase():
    def move(instruments):
        instruments.operation_begins(1, Call("broadcast", "barrier"))

    assert happens(",phase=broadcast", move)
    assert not happens(",phase=barrier", move)


def test_a_fault_may_happen_before_the_first_step():
    variables = Call("broadcast", "variables")
    assert happens(",phase=broadcast", lambda instruments: instruments.operation_begins(1, variables))
    assert not happens(",phase=update", lambda instruments: instruments.operation_ends())


def test_a_fault_may_happen_while_a_collective_waits():
    def wait(instruments):
        instruments.operation_begins(1, Call("barrier"))
        instruments.waiting_for([1])

    assert happens(",phase=waiting", wait)


@pytest.mark.parametrize(("phase", "step"), [(DATA, 3), (CHECKPOINT, 2), (UPDATE, 2)])
def test_a_fault_happens_in_phases_outside_of_collectives(phase, step):
    """The data phase belongs to the next step."""

    def go_on(instruments):
        instruments.step_begins(2)
        for name in PHASES:
            with instruments.during[name]:
                pass

    assert happens(f",phase={phase}", go_on)
    assert happens(f",phase={phase},step={step}", go_on)
    assert not happens(f",phase={phase},step={5 - step}", go_on)


def test_a_fault_in_the_data_phase_needs_a_next_batch():
    """At the end of a data set, no next step begins."""

    def read(batches):
        def see(instruments):
            instruments.step_begins(2)
            with suppress(StopIteration), instruments.during[DATA]:
                next(iter(batches))

        return happens(",phase=data", see)

    assert read(["a batch"])
    assert not read([])


def test_phase_names_of_faults_equal_those_of_instruments():
    assert (faults.DATA, faults.UPDATE, faults.CHECKPOINT) == (DATA, UPDATE, CHECKPOINT)


def test_a_bit_is_flipped_once():
    injector = FaultInjector([Fault("flip-bit", 0, step=2)])
    flips = []
    for step in (1, 2, 2, 3):
        injector.step_begins(step)
        flips.append(injector.take_flip())
    assert flips == [False, True, False, False]


def test_a_fault_happens_once():
    instruments = Instruments(FaultInjector([Fault("raise", 0)]))
    with pytest.raises(InjectedError, match="injected into instance 0 in phase forward"):
        instruments.step_begins(0)
    train(instruments, 0)


def test_only_faults_of_the_attempt_and_the_instance_are_due():
    environ = {"POPDIST_INJECT": "raise:instance=0,attempt=1;kill:instance=0"}
    assert due_faults({}, 0) == []
    assert due_faults({"POPDIST_INJECT": "raise:instance=0,attempt=1"}, 0) == []
    assert due_faults(environ, 1) == []
    assert due_faults(environ, 0) == [Fault("kill", 0)]
    assert due_faults(environ | {"POPDIST_RESTART_COUNT": "1"}, 0) == [Fault("raise", 0, attempt=1)]


BREAKS_CONNECTIONS = """
import os, socket, sys
from popdist.records.faults import Fault, FaultInjector
listening = socket.create_server(("127.0.0.1", 0))
one, inside = socket.create_connection(listening.getsockname()), socket.socketpair()
other = listening.accept()[0]
reader, writer = os.pipe()
FaultInjector([Fault("cut", 0)]).step_begins(0)
print(one.recv(1), other.recv(1))
inside[0].send(b"local")
os.close(writer)
print(inside[1].recv(9), os.read(reader, 9))
socket.create_connection(listening.getsockname())
"""


def test_cut_breaks_all_tcp_connections_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", BREAKS_CONNECTIONS], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout == "b'' b''\nb'local' b''\n"
    assert done.stderr.splitlines()[-1].startswith("ConnectionRefusedError")
