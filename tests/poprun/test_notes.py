from __future__ import annotations

import pytest

from poprun.cli.launch_options import OPTIONS
from poprun.cli.settings import LaunchSettings, note_without_effect, warn_of_deprecated, warn_of_output

EVERYTHING = {"vipu_partition": "p", "on_failure": "restart"}


def noted(given, elsewhere=False, **options):
    return note_without_effect(given, LaunchSettings(("p",), **options), elsewhere)


def test_options_that_were_not_given_get_no_note():
    assert warn_of_deprecated([]) == []
    assert noted([]) == []
    assert noted(["num-replicas", "vv"]) == []


def test_a_deprecated_option_names_its_replacement():
    assert warn_of_deprecated(["numa-aware"]) == [
        "--numa-aware is deprecated and has no effect; "
        "--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own"
    ]
    assert (
        "--vipu-cluster is deprecated and has no effect; leave it out (--vipu-allocation replaces it, and has no effect"
        in warn_of_deprecated(["vipu-cluster"])[0]
    )


def test_an_output_option_without_effect_names_its_replacement():
    assert warn_of_output(["--tag-output", "-output-filename", "d", "--mca", "a", "b"]) == [
        "mpirun's --output-filename has no effect, because instances write to poprun; use --output-dir"
    ]
    assert [line[-12:] for line in warn_of_output(["--timestamp-output"])] == ["--timestamps"]
    assert warn_of_output(["--tag-output", "-x", "A"]) == []


def test_options_with_the_same_reason_share_one_line():
    assert noted(["sync-type", "vipu-server-host", "vipu-partition"], True, **EVERYTHING) == [
        "without effect, because there is no V-IPU server, partitions are simulated: --sync-type, --vipu-server-host"
    ]


def test_every_other_option_of_the_vipu_server_is_noted():
    of_the_server = [option.name for option in OPTIONS if option.section == "V-IPU" and option.name != "vipu-partition"]
    (line,) = noted(of_the_server, True, **EVERYTHING)
    assert all(f"--{name}" in line for name in of_the_server)


@pytest.mark.parametrize(
    ("given", "elsewhere", "options", "reason"),
    [
        ("vipu-partition", False, {"vipu_partition": "p"}, None),
        ("max-restarts", False, {}, "--on-failure is stop"),
        ("max-restarts", False, {"on_failure": "restart"}, None),
        ("vipu-partition", False, {"vipu_partition": "p", "offline_mode": True}, "--offline-mode is on"),
        ("host-subnet", False, {}, "the job stays on this machine"),
        ("host-subnet", True, EVERYTHING, None),
        ("synchronise-poplar-sdk", True, EVERYTHING, "there is no Poplar SDK"),
    ],
)
def test_the_note_gives_the_reason_of_the_circumstances(given, elsewhere, options, reason):
    lines = noted([given], elsewhere, **options)
    assert lines == ([f"without effect, because {reason}: --{given}"] if reason else [])
