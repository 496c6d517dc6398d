"""The modules that poprun loads before mpirun starts; each of them delays every launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

AT_THE_FORK = """
import os, sys

def note(event, _):
    if event == "os.fork":
        print(*sys.modules, flush=True)
        os._exit(0)

sys.addaudithook(note)
from poprun.__main__ import main
main(sys.argv[1:])
"""
"""A program that prints the loaded modules when poprun forks the process that will be mpirun, and ends there."""

NEEDED = {
    *("popdist", "popdist.errors", "popdist.instance", "popdist.version", "popdist.xla"),
    *(f"popdist.environments{room}" for room in ("", ".environment", ".open_mpi", ".poprun")),
    *("poprun", *(f"poprun.{name}" for name in ("__main__", "command", "errors"))),
    *(f"poprun.{room}" for room in ("cli", "hosts", "ipc", "launch", "output", "supervisor")),
    *(f"poprun.cli.{name}" for name in ("command_line", "launch_options", "log", "mpi_arguments", "options")),
    *(f"poprun.cli.{name}" for name in ("settings", "wording")),
    *(f"poprun.hosts.{name}" for name in ("hosts", "survey_script", "this_machine")),
    *(f"poprun.ipc.{name}" for name in ("processes", "sockets", "streams", "wire")),
    *(f"poprun.launch.{name}" for name in ("launch", "placement", "plan", "program", "transports", "variables")),
    *(f"poprun.output.{name}" for name in ("output", "output_style")),
    *(f"poprun.supervisor.{name}" for name in ("job", "mpirun", "reception", "signals", "starting")),
}
"""Our modules that a launch on this machine needs; it needs no library of others."""

SLOW = {
    *("argparse", "asyncio", "bz2", "concurrent", "difflib", "email", "hashlib", "hmac", "html", "http"),
    *("importlib.metadata", "importlib.resources", "json", "logging", "lzma", "multiprocessing", "pickle"),
    *("random", "shlex", "shutil", "ssl", "subprocess", "tempfile", "textwrap", "tomllib", "traceback", "unittest"),
    *("uuid", "zipfile", "zlib"),
}
"""Modules of Python that a launch on this machine can do without."""


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Provide the names of all modules that are loaded when poprun starts mpirun."""
    options = ["--allow-run-as-root", "yes", "-n", "2", "--num-replicas", "4"]
    # without site-packages, so that nothing of the environment's own is loaded
    words = [sys.executable, "-S", "-c", AT_THE_FORK, *options, sys.executable, "-c", "pass"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    ended = subprocess.run(
        words, env=kept | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return set(ended.stdout.split())


def test_only_the_needed_modules_are_loaded_before_mpirun(loaded: set[str]) -> None:
    ours = {name for name in loaded if name.partition(".")[0] in ("collectives", "popdist", "poprun", "strategies")}
    assert ours == NEEDED


def test_no_library_is_loaded_before_mpirun(loaded: set[str]) -> None:
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert foreign == {"__main__", "popdist", "poprun"}


def test_no_slow_module_of_python_is_loaded_before_mpirun(loaded: set[str]) -> None:
    assert loaded & SLOW == set()
