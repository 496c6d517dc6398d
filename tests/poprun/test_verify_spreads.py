"""The runs that `poprun verify` makes."""

from __future__ import annotations

import pytest

from poprun.cli.command_line import CommandLine
from poprun.verify.command import prepare
from poprun.verify.options import VerifyRequest, read_words
from poprun.verify.running import (
    Run,
    choose_spreads,
    hosts_of,
    plain_runs,
    run_to_resume,
    run_with_failure,
    settings_of,
)

GIB = 1 << 30


def asked(replicas: int = 8, **options) -> VerifyRequest:
    values = {"num-replicas": replicas, **options.pop("values", {})}
    return VerifyRequest(CommandLine(values, ("python", "train.py")), **options)


@pytest.mark.parametrize(
    ("replicas", "cores", "memory_bytes", "chosen"),
    [
        (1, 2, None, (1,)),
        (7, 2, None, (1, 7)),
        (8, 2, 16 * GIB, (1, 2, 4, 8)),
        (8, 1, 16 * GIB, (1, 2, 4)),
        (12, 8, 16 * GIB, (1, 3, 4, 12)),
        (11, 2, None, (1,)),
        (64, 2, 16 * GIB, (1, 2, 4, 8)),
        (64, 64, 16 * GIB, (1, 4, 8, 32)),
        (8, 64, GIB, (1, 2)),
        (8, 64, 0, (1, 2)),
    ],
)
def test_at_most_four_spreads_include_one_instance_and_the_most_that_fit(replicas, cores, memory_bytes, chosen):
    assert choose_spreads(replicas, cores, memory_bytes) == chosen


def test_every_spread_runs_over_every_transport_and_one_instance_runs_once():
    runs = plain_runs(asked(transports=("mpi", "grpc")), (1, 2, 8))
    assert [(run.instances, run.transport) for run in runs] == [
        (1, "mpi"),
        (2, "mpi"),
        (8, "mpi"),
        (2, "grpc"),
        (8, "grpc"),
    ]
    assert [str(run) for run in runs] == ["1 x 8", "2 x 4", "8 x 1", "2 x 4 (grpc)", "8 x 1 (grpc)"]


def test_a_single_run_is_repeated_unless_there_is_a_certificate(tmp_path):
    assert plain_runs(asked(), (2,)) == [Run(2, 8), Run(2, 8)]
    assert plain_runs(asked(against=tmp_path), (2,)) == [Run(2, 8)]


def test_the_last_instance_of_the_widest_spread_is_killed_halfway():
    plain = [Run(1, 8), Run(4, 8), Run(8, 8, "grpc")]
    assert run_with_failure(asked(), plain, 10) is None
    assert run_with_failure(asked(inject=("some",)), plain, 11) == Run(4, 8, faults=("kill:instance=3,step=5",))
    named = ("stop:instance=0,step=1",)
    assert run_with_failure(asked(inject=named), plain, 11) == Run(4, 8, faults=named)


def test_a_run_is_resumed_on_the_next_smaller_spread():
    assert run_to_resume(asked(), [Run(1, 8)]) is None
    resumed = run_to_resume(asked(resume=True), [Run(1, 8), Run(2, 8), Run(8, 8)])
    assert resumed == Run(8, 8, resumed_on=2)
    assert str(resumed) == "8 x 1, 2 x 4 (mpi, stopped and resumed)"
    assert run_to_resume(asked(resume=True), [Run(2, 8), Run(2, 8)]) == Run(2, 8, resumed_on=2)


@pytest.mark.parametrize("word", ["--resume", "--inject"])
def test_beside_a_run_with_losses_others_have_several_instances_too(word):
    words = ["--allow-run-as-root=yes", "--num-replicas=8", "--with-losses", word, "python", "train.py"]
    request = read_words(words)
    assert request is not None
    spreads, plain = prepare(request)
    assert {run.instances for run in plain} == set(spreads) != {1}
    resumed = run_to_resume(request, plain)
    assert resumed is None or resumed.resumed_on < resumed.instances


class TestSettings:
    def test_runs_with_a_failure_have_the_spares_that_the_user_wants(self):
        values = {"spares": 2, "instance-mpi-local-args": ("3:-x A=1",), "only-output-from-instance": 3}
        run = run_with_failure(asked(inject=("some",), values=values), [Run(2, 8)], 11)
        assert run == Run(2, 8, faults=("kill:instance=1,step=5",), spares=2)
        settings = settings_of(asked(values=values), run)
        assert (settings.num_processes, settings.on_failure, settings.only_output_from_instance) == (4, "replace", 3)
        assert settings.mpi.instances[3].exports == {"A": "1"}
        plain = settings_of(asked(values=values), Run(2, 8))
        assert (plain.num_processes, plain.on_failure, plain.only_output_from_instance) == (2, "stop", 0)

    def test_settings_of_the_user_are_kept(self):
        settings = settings_of(asked(values={"timestamps": True}), Run(4, 8))
        assert (settings.num_instances, settings.num_replicas, settings.timestamps) == (4, 8, True)
        assert settings.on_failure == "stop"

    def test_a_run_with_a_fault_shrinks(self):
        settings = settings_of(asked(), Run(4, 8, faults=("kill:instance=3",)))
        assert (settings.inject, settings.on_failure) == (("kill:instance=3",), "shrink")

    def test_options_for_absent_instances_are_dropped(self):
        values = {"instance-mpi-local-args": ("0:-x A=1", "3:-x A=2"), "only-output-from-instance": 3}
        settings = settings_of(asked(values=values), Run(2, 8))
        assert settings.instance_mpi_local_args == ((0, ("-x", "A=1")),)
        assert settings.only_output_from_instance == 0
        assert settings_of(asked(values=values), Run(4, 8)).only_output_from_instance == 3

    @pytest.mark.parametrize(("instances", "hosts"), [(1, ("a",)), (2, ("a", "b")), (3, ("a",)), (4, ("a", "b"))])
    def test_a_run_uses_a_number_of_hosts_that_divides_its_instances(self, instances, hosts):
        assert settings_of(asked(12, values={"host": ("a,b",)}), Run(instances, 12)).host == hosts

    def test_the_requested_hosts_are_listed(self):
        assert [host.name for host in hosts_of(asked(values={"host": ("a,b", "c")}))] == ["a", "b", "c"]
        assert [host.is_this_machine for host in hosts_of(asked())] == [True]

    def test_the_output_of_each_run_is_separate(self):
        values = {"output-dir": "out"}
        names = {settings_of(asked(values=values), run).output_dir for run in plain_runs(asked(), (1, 2, 4, 8))}
        assert names == {"out/1-x-8", "out/2-x-4", "out/4-x-2", "out/8-x-1"}
