from __future__ import annotations

import pytest

from poprun.cli.notes import Circumstances, note_without_effect, warn_of_deprecated, warn_of_output
from poprun.cli.options import OPTIONS

WITH_EVERYTHING = Circumstances(has_partition=True, leaves_this_machine=True, on_failure="restart")


def test_nothing_is_said_about_what_was_not_given():
    assert warn_of_deprecated([]) == []
    assert note_without_effect([], Circumstances()) == []
    assert note_without_effect(["num-replicas", "vv"], Circumstances()) == []


def test_deprecated_options_name_what_to_use():
    assert warn_of_deprecated(["numa-aware"]) == [
        "--numa-aware is deprecated and has no effect; "
        "--process-placement spreadnuma, the default, gives each instance NUMA nodes of its own"
    ]
    assert "--vipu-allocation has replaced it" in warn_of_deprecated(["vipu-cluster"])[0]


def test_options_of_mpirun_for_output_that_it_does_not_see_name_what_to_use():
    assert warn_of_output(["--tag-output", "-output-filename", "d", "--mca", "a", "b"]) == [
        "mpirun's --output-filename has no effect, because instances write to poprun; use --output-dir"
    ]
    assert [line[-12:] for line in warn_of_output(["--timestamp-output"])] == ["--timestamps"]
    assert warn_of_output(["--tag-output", "-x", "A"]) == []


def test_all_options_of_one_reason_are_in_one_line():
    assert note_without_effect(["sync-type", "vipu-server-host", "vipu-partition"], WITH_EVERYTHING) == [
        "without effect, because there is no V-IPU server, partitions are simulated: --vipu-server-host, --sync-type"
    ]


def test_every_other_option_of_the_server_is_noted():
    of_the_server = [
        o.name for o in OPTIONS if o.section == "V-IPU" and o.name not in ("vipu-partition", "update-partition")
    ]
    (line,) = note_without_effect(of_the_server, WITH_EVERYTHING)
    assert all(f"--{name}" in line for name in of_the_server)


@pytest.mark.parametrize(
    ("given", "circumstances", "reason"),
    [
        ("update-partition", Circumstances(), "there is no --vipu-partition"),
        ("update-partition", Circumstances(has_partition=True), None),
        ("vipu-partition", Circumstances(has_partition=True), None),
        ("max-restarts", Circumstances(), "--on-failure is stop"),
        ("max-restarts", Circumstances(on_failure="restart"), None),
        ("vipu-partition", Circumstances(has_partition=True, is_offline=True), "--offline-mode is on"),
        ("host-subnet", Circumstances(), "the job stays on this machine"),
        ("host-subnet", WITH_EVERYTHING, None),
        ("synchronise-poplar-sdk", WITH_EVERYTHING, "there is no Poplar SDK"),
    ],
)
def test_it_depends_on_the_circumstances(given, circumstances, reason):
    lines = note_without_effect([given], circumstances)
    assert lines == ([f"without effect, because {reason}: --{given}"] if reason else [])


def test_only_known_options_are_noted():
    names = [option.name for option in OPTIONS]
    for circumstances in (Circumstances(), Circumstances(has_partition=True, is_offline=True)):
        noted = " ".join(note_without_effect(names, circumstances))
        assert noted.count("--") >= 14
    everything = [f"no-such-{name}" for name in names]
    assert note_without_effect(everything, Circumstances()) == []
