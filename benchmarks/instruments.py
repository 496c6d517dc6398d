"""What it costs to tell instruments of an event: where nobody looks, where one does, and where two do.

Usage:

    python benchmarks/instruments.py [--repeats 1000] [--json PATH]

Columns: ns for an event with no instrument, with the progress page of poprun, and with two instruments that do nothing.
Events are told as the collectives and the `Trainer` tell them; a phase counts as two. Each figure is the least of many
short repeats, so that other programs hardly matter. Below are those to compare with: a call of an empty function,
`contextlib.nullcontext`, which counts as two events too, and the shortest of all operations, the barrier of a
communicator of one rank, where nobody looks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import timeit
from collections.abc import Callable

from timing import OtherLoad, describe_machine, write_figures  # finds the project, too

import collectives
from collectives import Settings
from collectives.calls import Call
from collectives.instruments import UPDATE, Instruments, is_seen
from popdist.records import ProgressPage
from popdist.records.progress import new_page

PROMISED_NS = 100.0
SETTINGS = ("repeats",)
CALLS = 500  # in one repeat: some 50 us, which often pass without an interruption
WAYS = ("nobody", "the page", "two")
EVENTS = ("operation begins", "data move", "operation ends", "step begins", "step made", "phase")


class Idle:
    """Sees everything, and does nothing."""

    def operation_begins(self, number: int, call: Call) -> None:
        """See `collectives.instruments`, as for all the others."""

    def operation_ends(self) -> None:
        """See there."""

    def data_moves(self, nbytes: int) -> None:
        """See there."""

    def step_begins(self, step: int) -> None:
        """See there."""

    def steps_made(self, steps: int, rows: int, loss: Callable[[], float | None]) -> None:
        """See there."""

    def phase_begins(self, phase: str) -> None:
        """See there."""

    def phase_ends(self, phase: str) -> None:
        """See there."""


def main() -> None:
    options = read_options()
    load = OtherLoad()
    ways = {"nobody": Instruments(), "the page": Instruments(a_page()), "two": Instruments(Idle(), Idle())}
    events_ns = {way: events_of(instruments, options.repeats) for way, instruments in ways.items()}
    compared_ns = compared(options.repeats)
    print(f"{'ns':<40}" + "".join(f"{way:>10}" for way in WAYS))
    for event in EVENTS:
        print(f"{event:<40}" + "".join(f"{events_ns[way][event]:>10.1f}" for way in WAYS))
    for what, nanoseconds in compared_ns.items():
        print(f"{what:<40}{nanoseconds:>10.1f}")
    worst = max(events_ns["nobody"].values())
    print(f"where nobody looks an event costs {worst:.0f} ns at most; promised are less than {PROMISED_NS:.0f}")
    load.warn()
    write_figures(options, SETTINGS, describe_machine(), load, events_ns=events_ns, compared_ns=compared_ns)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000, metavar="N", help="of each measurement (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    return parser.parse_args()


def a_page() -> ProgressPage:
    """A page like that of a job, which nobody reads."""
    descriptor = os.memfd_create("progress")
    os.write(descriptor, new_page())
    return ProgressPage(descriptor)


def events_of(instruments: Instruments, repeats: int) -> dict[str, float]:
    """Nanoseconds for each of `EVENTS`."""
    call = Call("barrier")
    begins, moves, ends = (
        told if is_seen(told) else None  # as a communicator does
        for told in (instruments.operation_begins, instruments.data_moves, instruments.operation_ends)
    )
    made = {"loss": lambda: 0.5, "instruments": instruments}
    names = {"begins": begins, "moves": moves, "ends": ends, "call": call, **made}
    statements = {
        "operation begins": "if begins is not None: begins(1, call)",
        "data move": "if moves is not None: moves(0)",
        "operation ends": "if ends is not None: ends()",
        "step begins": "instruments.step_begins(1)",
        "step made": "instruments.steps_made(1, 64, loss)",
        "phase": f"with instruments.during[{UPDATE!r}]: pass",
    }
    found = {event: nanoseconds(statement, names, repeats) for event, statement in statements.items()}
    return found | {"phase": found["phase"] / 2}


def compared(repeats: int) -> dict[str, float]:
    """Nanoseconds for what is to be compared with events."""

    def empty(number: int, call: None) -> None: ...

    with collectives.connect("single", Settings()) as communicator:
        barrier = nanoseconds("barrier()", {"barrier": communicator.barrier}, repeats)
    return {
        "a call of an empty function": nanoseconds("empty(1, None)", {"empty": empty}, repeats),
        "contextlib.nullcontext": nanoseconds("with null: pass", {"null": contextlib.nullcontext()}, repeats) / 2,
        "a barrier of one rank": barrier,
    }


def nanoseconds(statement: str, names: dict[str, object] | dict[str, Callable[..., None]], repeats: int) -> float:
    """The least that a statement took, without the loop around it."""
    least, of_loop = (
        min(timeit.repeat(each, globals=names, number=CALLS, repeat=repeats)) for each in (statement, "pass")
    )
    return 1e9 * (least - of_loop) / CALLS


if __name__ == "__main__":
    main()
