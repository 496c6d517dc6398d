"""Launches of a program on several hosts over ssh, by poprun and by mpirun alone; a part of `hosts.py`.

Rows: "mpirun" alone; "poprun" with the hosts' answers cached; "poprun, asks" with an empty cache, so that it examines
all hosts first; "poprun, wrong host" until it has refused an unknown host name. The links are not shaped.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from launch import PROGRAMS
from timing import ROOT_ALLOWED

from poprun.launch.program import find_mpirun

if TYPE_CHECKING:
    from beds import Bed

PROGRAM = "mpi4py"
WRONG = "no-such-host"
LIMIT_S = 120.0


def poprun_command(bed: Bed, instances: int, words: Sequence[str] = (), wrong: Sequence[str] = ()) -> list[str]:
    """Return poprun's part of the command, without placement: each simulated host counts all cores as its own."""
    names = [*bed.names, *wrong]
    total = str(instances * len(names))
    job = ["--host", ",".join(names), "--num-instances", total, "--num-replicas", total, "--allow-run-as-root", "yes"]
    return [sys.executable, "-m", "poprun", *job, "--process-placement", "disabled", *words]


def mpirun_command(bed: Bed, instances: int) -> list[str]:
    """Return plain mpirun's part of the command."""
    hosts = ",".join(f"{name}:{instances}" for name in bed.names)
    ssh = ["--prtemca", "plm_ssh_args", shlex.join(bed.ssh_arguments)]
    total = str(instances * len(bed.names))
    return [find_mpirun(sys.executable, os.environ), *ssh, "--host", hosts, "--bind-to", "none", "-np", total]


def measure(bed: Bed, instances: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds to the end of the program, as medians of launches in turns."""
    program = PROGRAMS[PROGRAM]
    ways = {
        "mpirun": [*mpirun_command(bed, instances), *program],
        "poprun": [*poprun_command(bed, instances), *program],
        "poprun, asks": [*poprun_command(bed, instances), *program],
        "poprun, wrong host": [*poprun_command(bed, instances, wrong=[WRONG]), *program],
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first launch warms up and fills the cache
        for way, command in ways.items():
            forgets = {"XDG_CACHE_HOME": str(bed.shared / f"cache-{turn}")} if way == "poprun, asks" else {}
            took_ms = launch(bed, command, "wrong" in way, forgets)
            times[way] += [took_ms] * (turn > 0)
    ms = {way: median(of_way) for way, of_way in times.items()}
    return {
        "program": PROGRAM,
        "instances": instances * len(bed.names),
        "ms": ms,
        "added_ms": {way: ms[way] - ms["mpirun"] for way in ways if way != "mpirun" and "wrong" not in way},
        "rounds_ms": times,
    }


def launch(bed: Bed, command: Sequence[str], shall_fail: bool, environ: dict[str, str]) -> float:
    """Return milliseconds to the end of a launch.

    Raises:
        SystemExit: If it has not ended as expected.
    """
    environ = bed.environ | ROOT_ALLOWED | {"PWD": str(Path.cwd())} | environ
    began = time.perf_counter()
    done = subprocess.run(
        bed.command("h0", *command),
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    took_ms = 1e3 * (time.perf_counter() - began)
    expected = WRONG if shall_fail else "first"
    if bool(done.returncode) != shall_fail or expected not in done.stdout + done.stderr:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return took_ms


def print_table(figures: dict[str, Any]) -> None:
    load = os.getloadavg()[0]
    print(
        f"launch of {figures['instances']} instances, ms to the end of {figures['program']}, medians, load {load:.1f}"
    )
    for way, ms in figures["ms"].items():
        added = figures["added_ms"].get(way)
        print(f"{way:<20}{ms:>8.0f}{'' if added is None else f'{added:>+8.0f}'}", flush=True)
