"""The flags of XLA that poprun gives the programs of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from popdist.xla import WITHOUT_SUMS
from poprun.cli.settings import LaunchSettings
from poprun.launch.plan import plan_launch
from poprun.launch.variables import find_jaxlib, sums_setting


@pytest.fixture
def wrong_jaxlib(tmp_path):
    """Provide variables that let a program find a jaxlib with wrong sums."""
    return with_jaxlib(tmp_path, "0.10.2")


def with_jaxlib(folder: Path, version: str) -> dict[str, str]:
    (folder / f"jaxlib-{version}.dist-info").mkdir()
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f":{folder}"}


def job(program: str = sys.executable, **options: object) -> LaunchSettings:
    return LaunchSettings(program=(program, "train.py"), allow_run_as_root=True, **options)


def test_programs_of_the_same_python_get_the_flags_of_their_jaxlib(wrong_jaxlib):
    assert sums_setting(job(), wrong_jaxlib) == {"XLA_FLAGS": WITHOUT_SUMS}
    assert plan_launch(job(), wrong_jaxlib).extra["XLA_FLAGS"] == WITHOUT_SUMS


def test_flags_of_the_user_are_kept_on_all_hosts(wrong_jaxlib):
    environ = wrong_jaxlib | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    settings = job(host=("a,b",), num_instances=2, num_replicas=2, dry_run=True)
    launch = plan_launch(settings, environ)
    assert launch.extra["XLA_FLAGS"] == f"--xla_cpu_enable_fast_math=false {WITHOUT_SUMS}"
    assert "XLA_FLAGS" not in launch.forwarded


@pytest.mark.parametrize("version", ["0.10.1", "99.0"])
def test_a_correct_or_unknown_jaxlib_gets_no_flags(tmp_path, version):
    assert sums_setting(job(), with_jaxlib(tmp_path, version)) == {}


@pytest.mark.parametrize("program", ["echo", "/only/there"])
def test_other_programs_get_no_flags(wrong_jaxlib, program):
    assert sums_setting(job(program), wrong_jaxlib) == {}


def test_flags_that_the_user_exports_are_kept(wrong_jaxlib):
    assert sums_setting(job(mpi_local_args=("-x", "XLA_FLAGS=--a")), wrong_jaxlib) == {}


def test_the_first_jaxlib_on_the_path_counts(tmp_path):
    for version in ("0.9.0.1", "0.11.2"):
        (tmp_path / version).mkdir()
        with_jaxlib(tmp_path / version, version)
    assert find_jaxlib(["", "/no/such/folder", str(tmp_path / "0.9.0.1"), str(tmp_path / "0.11.2")]) == "0.9.0.1"
    assert find_jaxlib([]) == ""
