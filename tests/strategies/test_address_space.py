"""What is said where a limit of address space is too low for XLA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.programs.xla_pitfalls import ROOM_BYTES, describe_lack

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import resource
import strategies
from strategies.programs.xla_pitfalls import ROOM_BYTES, _used_bytes
resource.setrlimit(resource.RLIMIT_AS, (_used_bytes() + ROOM_BYTES - (300 << 20), resource.RLIM_INFINITY))
strategy = strategies.IPUStrategy()
"""
STARTED = PROGRAM.replace("resource.setrlimit", "import jax; jax.devices(); resource.setrlimit")


def test_a_limit_that_will_do_is_not_mentioned():
    assert describe_lack(10**9 + ROOM_BYTES, 10**9) == ""


def test_one_that_will_not_is_explained_with_its_numbers():
    assert describe_lack(15 * 10**8, 45 * 10**7).startswith(
        "this process may use 1.50 GB of address space (ulimit -v) and uses 0.45 GB; XLA's threads reserve 1.34 GB"
    )


@pytest.mark.complete
def test_it_is_the_first_thing_that_is_said_whatever_becomes_of_the_process():
    said = run(PROGRAM).stderr
    assert said.startswith("this process may use ")
    assert "raise the limit" in said.splitlines()[0]


def test_nothing_is_said_where_xla_has_started_already():
    assert "this process may use" not in run(STARTED).stderr


def run(program):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
