"""The numbers in limits.md are those of the code."""

from __future__ import annotations

import inspect
import re

import pytest
from pages import page_text

from collectives import Limits
from poprun.agent import program_output
from poprun.cli.launch_options import OPTIONS
from poprun.hosts import host_checks, survey, synchronise
from poprun.monitor import viewers
from poprun.output import output
from poprun.supervisor import job_events
from strategies import Checkpoints
from strategies.checkpoints import checkpoints
from strategies.core.options import CommonOptions
from strategies.jax.programs import compilation
from strategies.sinks import sinks

DEFAULTS = {f"--{option.name}": str(option.default) for option in OPTIONS}
OF_CHECKPOINTS = inspect.signature(Checkpoints).parameters
MIB = 1 << 20

ROWS = {
    "for other instances, until a warning": Limits().stall_warning_s,
    "for other instances, until `CollectiveTimeoutError`": Limits().timeout_s,
    "for workers over gRPC to start": Limits().connect_timeout_s,
    "for hosts to answer before a launch": survey.LIMIT_S,
    "for copies to all hosts": synchronise.COPY_LIMIT_S,
    "for the program to end after SIGTERM or Ctrl-C": job_events.INTERRUPT_GRACE_S,
    "for a checkpoint to be written": checkpoints.WRITE_LIMIT_S,
    "for another instance of the host to compile": compilation.WAIT_S,
    "rows of metrics that wait for a slow sink": sinks.MOST,
    "viewers of `poprun top`": viewers.MOST_VIEWERS,
    "a line of output that is kept together": program_output.LONGEST_LINE_BYTES / MIB,
    "output that poprun holds back for a slow reader": output.MOST_HELD_BYTES / MIB,
    "last lines of standard error of an instance whose output is not shown": output.TAIL_LINES,
    "shared memory that Open MPI takes for each instance of a host": host_checks.SHM_BYTES_PER_INSTANCE / MIB,
    "arrays whose optimizer state stays whole": CommonOptions.min_elements_for_sharding,
    "checkpoints that are kept": OF_CHECKPOINTS["keep"].default,
}


def rows_of_page():
    """Return the first number and the last column of each row, by its first column."""
    rows = re.findall(r"^\| ([^|]+) \| (?:below )?([\d.]+)[^|]* \| ([^|]+) \|$", page_text("limits.md"), re.MULTILINE)
    return {name: (float(number), way) for name, number, way in rows}


@pytest.mark.parametrize("name", ROWS)
def test_a_number_is_that_of_the_code(name):
    assert rows_of_page()[name][0] == ROWS[name]


@pytest.mark.parametrize("option", [way.strip("`") for _, way in rows_of_page().values() if way.startswith("`--")])
def test_a_default_of_an_option_is_that_of_the_option(option):
    [number] = [number for number, way in rows_of_page().values() if way == f"`{option}`"]
    assert float(DEFAULTS[option]) == number


def test_every_row_is_compared():
    others = {"for a busy sink of metrics: a checkpoint, the end of the program"}  # two numbers
    compared = {name for name, (_, way) in rows_of_page().items() if way.startswith("`--")} | set(ROWS)
    assert set(rows_of_page()) - compared == others
    assert (sinks.WAIT_S, sinks.CLOSING_S) == (1, 10)
    assert f"grace_s={OF_CHECKPOINTS['grace_s'].default:g}" in page_text("limits.md")
