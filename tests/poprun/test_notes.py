from __future__ import annotations

import pytest

from poprun.cli.launch_options import OPTIONS
from poprun.cli.settings import LaunchSettings, note_without_effect, warn_of_deprecated, warn_of_output

EVERYTHING = {"vipu_partition": "p", "on_failure": "restart"}


def noted(given, elsewhere=False, **options):
    return note_without_effect(given, LaunchSettings(("p",), **options), elsewhere)


def test_nothing_is_said_about_what_was_not_given():
    assert warn_of_deprecated([]) == []
    assert noted([]) == []
    assert noted(["num-replicas", "vv"]) == []


def test_deprecated_options_name_what_to_use():
    assert warn_of_deprecated(["numa-aware"]) == [
        "--numa-aware is deprecated and has no effect; "
        "--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own"
    ]
    assert (
        "--vipu-cluster is deprecated and has no effect; leave it out (--vipu-allocation replaces it, and has no effect"
        in warn_of_deprecated(["vipu-cluster"])[0]
    )


def test_options_of_mpirun_for_output_that_it_does_not_see_name_what_to_use():
    assert warn_of_output(["--tag-output", "-output-filename", "d", "--mca", "a", "b"]) == [
        "mpirun's --output-filename has no effect, because instances write to poprun; use --output-dir"
    ]
    assert [line[-12:] for line in warn_of_output(["--timestamp-output"])] == ["--timestamps"]
    assert warn_of_output(["--tag-output", "-x", "A"]) == []


def test_all_options_of_one_reason_are_in_one_line():
    assert noted(["sync-type", "vipu-server-host", "vipu-partition"], True, **EVERYTHING) == [
        "without effect, because there is no V-IPU server, partitions are simulated: --sync-type, --vipu-server-host"
    ]


def test_every_other_option_of_the_server_is_noted():
    of_the_server = [
        o.name for o in OPTIONS if o.section == "V-IPU" and o.name not in ("vipu-partition", "update-partition")
    ]
    (line,) = noted(of_the_server, True, **EVERYTHING)
    assert all(f"--{name}" in line for name in of_the_server)


@pytest.mark.parametrize(
    ("given", "elsewhere", "options", "reason"),
    [
        ("update-partition", False, {}, "there is no --vipu-partition"),
        ("update-partition", False, {"vipu_partition": "p"}, None),
        ("update-partition", False, {"vipu_partition": "p", "offline_mode": True}, "--offline-mode is on"),
        ("vipu-partition", False, {"vipu_partition": "p"}, None),
        ("max-restarts", False, {}, "--on-failure is stop"),
        ("max-restarts", False, {"on_failure": "restart"}, None),
        ("vipu-partition", False, {"vipu_partition": "p", "offline_mode": True}, "--offline-mode is on"),
        ("host-subnet", False, {}, "the job stays on this machine"),
        ("host-subnet", True, EVERYTHING, None),
        ("synchronise-poplar-sdk", True, EVERYTHING, "there is no Poplar SDK"),
    ],
)
def test_it_depends_on_the_circumstances(given, elsewhere, options, reason):
    lines = noted([given], elsewhere, **options)
    assert lines == ([f"without effect, because {reason}: --{given}"] if reason else [])
