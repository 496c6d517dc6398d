"""The decisions before a launch, on this machine; no process starts."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import slurm_records as records

from popdist.instance import this_host
from poprun.__main__ import main
from poprun.cli.settings import LaunchSettings
from poprun.errors import PopRunError, UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.this_machine import usable_cores
from poprun.launch.plan import find_hosts, plan_launch

FOUR = {"num_instances": 4, "num_replicas": 4}


def job(**options) -> LaunchSettings:
    return LaunchSettings(program=("echo",), allow_run_as_root=True, **options)


class TestHosts:
    def test_the_default_host_is_the_local_machine(self):
        assert find_hosts(job()) == (Host(this_host(), is_this_machine=True),)

    @pytest.mark.parametrize("name", [this_host(), this_host().upper(), "localhost", "127.0.0.1"])
    def test_the_local_machine_is_recognised(self, name):
        assert find_hosts(job(host=(name,))) == (Host(name, is_this_machine=True),)

    @pytest.mark.parametrize("name", ["no-such-host", "192.0.2.1", "0.0.0.0"])
    def test_other_names_are_not_looked_up(self, name):
        assert find_hosts(job(host=(name,))) == (Host(name),)

    def test_hosts_are_read_from_a_hostfile(self, tmp_path):
        (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
        assert find_hosts(job(hostfile=str(tmp_path / "hosts"))) == (Host("a", 2), Host("b", 2))

    def test_a_missing_hostfile_is_refused(self, tmp_path):
        with pytest.raises(
            UsageError, match="hostfile .*none cannot be read: No such file or directory; check the path"
        ):
            find_hosts(job(hostfile=str(tmp_path / "none")))


class TestPlan:
    def test_instances_are_placed_on_the_hosts(self):
        launch = plan_launch(job(host=("b,a",), dry_run=True, **FOUR), os.environ)
        assert [place.host for place in launch.places] == ["b", "b", "a", "a"]
        assert launch.leaves_this_machine

    def test_hosts_that_do_not_divide_the_instances_are_refused(self):
        with pytest.raises(UsageError, match="asked for 4 instances on 3 hosts"):
            plan_launch(job(host=("a,b,c",), **FOUR), os.environ)

    def test_the_program_must_exist_if_instances_run_here(self):
        elsewhere = LaunchSettings(program=("/only/there",), host=("no-such-host",), dry_run=True)
        assert plan_launch(elsewhere, os.environ).settings.program == ("/only/there",)
        with pytest.raises(UsageError, match="program '/only/there' does not exist"):
            plan_launch(replace(elsewhere, host=("localhost",)), os.environ)

    def test_each_host_has_its_own_cores(self):
        cores = len(usable_cores())

        def oversubscribes(instances):
            settings = job(host=("a,b",), num_instances=instances, num_replicas=instances, dry_run=True)
            return plan_launch(settings, os.environ).oversubscribes

        assert not oversubscribes(2 * cores)
        assert oversubscribes(2 * cores + 2)

    @pytest.mark.parametrize("option", ["synchronise_python_venv", "distribute_ssh_key"])
    def test_options_that_need_ssh_are_refused_in_a_slurm_job_without_named_hosts(self, option):
        options = {"num_instances": 2, "num_replicas": 2, "dry_run": True, option: True}
        environ = os.environ | records.JOB_OF_3
        wanted = rf"--{option.replace('_', '-')} works by ssh, .* the hosts of Slurm job \d+ by srun, .* with --host"
        with pytest.raises(UsageError, match=wanted):
            plan_launch(job(**options), environ)
        assert plan_launch(job(host=("h[0-1]",), **options), environ).leaves_this_machine

    @pytest.mark.parametrize(
        ("options", "devices"),
        [
            ({}, [None] * 4),
            ({"vipu_partition": "p"}, [0, 1, 2, 3]),
            ({"vipu_partition": "p", "ipus_per_replica": 4}, [24, 25, 26, 27]),
            ({"vipu_partition": "p", "offline_mode": True}, [None] * 4),
        ],
    )
    def test_a_partition_gives_each_instance_its_device(self, options, devices):
        launch = plan_launch(job(**FOUR, **options), os.environ)
        assert [place.device for place in launch.places] == devices


def test_an_environment_with_a_space_in_its_path_is_refused_for_other_hosts(monkeypatch):
    monkeypatch.setattr("poprun.launch.plan.find_mpirun", lambda *_: "/my folder/bin/mpirun")
    with pytest.raises(PopRunError, match="/my folder/bin/mpirun has a space in its path"):
        plan_launch(job(host=("a,b",), **FOUR), os.environ)
    plan_launch(job(**FOUR), os.environ)


class TestCommand:
    """`main` up to the start of processes."""

    WORDS = ("--num-instances", "2", "--num-replicas", "2", "-H", "node[00-01]")

    def test_a_dry_run_writes_only_the_command_to_standard_output(self, capfd):
        assert main(["--dry-run", *self.WORDS, "echo", "a b"]) == 0
        shown = capfd.readouterr()
        words = shlex.split(shown.out)
        assert shown.out.count("\n") == 1
        assert [host for word, host in zip(words, words[1:], strict=False) if word == "--host"] == [
            "node00:1",
            "node01:1",
        ]
        assert words[-2:] == ["echo", "a b"]
        assert "poprun topology" in shown.err
        assert "instance  host    cores" in shown.err

    def test_a_requested_topology_goes_to_standard_output_as_in_a_real_run(self, capfd):
        main(["--dry-run", "--print-topology=yes", *self.WORDS, "echo"])
        shown = capfd.readouterr()
        assert "poprun topology" in shown.out
        assert "poprun topology" not in shown.err

    def test_json_output_contains_nothing_else(self, capfd):
        assert main(["--dry-run", "--json", "-vv", *self.WORDS, "echo"]) == 0
        described = json.loads(capfd.readouterr().out)
        assert [each["host"] for each in described["instances"]] == ["node00", "node01"]

    @pytest.mark.parametrize(("words", "value"), [(("--num-instances", "2"), "1"), (WORDS, "0")])
    def test_an_outer_job_does_not_say_whether_the_number_of_replicas_was_left_out(
        self, capfd, monkeypatch, words, value
    ):
        monkeypatch.setenv("POPDIST_REPLICAS_LEFT_OUT", "1")
        assert main(["--dry-run", *words, "echo"]) == 0
        assert f"POPDIST_REPLICAS_LEFT_OUT={value}\n" in capfd.readouterr().err

    @pytest.mark.skipif(" " in sys.prefix, reason="jobs on other hosts cannot start from a path with a space")
    def test_each_unreachable_host_is_refused_in_one_line(self, capfd, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert main(["--allow-run-as-root=yes", *self.WORDS, "echo"]) == 1
        shown = capfd.readouterr()
        assert shown.out == ""
        errors = [line.partition(" POPRUN [E] ")[2] for line in shown.err.splitlines() if " POPRUN [W] " not in line]
        assert [error.split(":")[0] for error in errors] == ["host node00", "host node01"]  # a busy machine may warn

    def test_a_dry_run_refuses_an_invalid_network(self, capfd):
        assert main(["--dry-run", "--host-subnet", "10.0.0.0/99", *self.WORDS, "echo"]) == 2
        assert "--host-subnet is 10.0.0.0/99: " in capfd.readouterr().err
        assert main(["--dry-run", "--host-subnet", "no-interface-of-ours", *self.WORDS, "echo"]) == 0

    def test_words_that_are_not_text_are_printed_unchanged(self, capfdbinary):
        odd = b"\xff".decode(errors="surrogateescape")
        assert main(["--dry-run", "echo", odd]) == 0
        assert capfdbinary.readouterr().out.endswith(b" echo '\xff'\n")

    def test_ssh_arguments_that_cannot_be_split_are_refused_in_one_line(self, capfd, monkeypatch):
        monkeypatch.setenv("POPRUN_SSH_ARGS", "-F 'x")
        assert main(["--dry-run", *self.WORDS, "echo"]) == 2
        assert main(["doctor"]) == 2
        lines = capfd.readouterr().err.splitlines()
        assert [line.partition("[E] ")[2].partition(" cannot")[0] for line in lines] == ["POPRUN_SSH_ARGS"] * 2

    def test_options_without_effect_are_noted_once_at_v(self, capfd):
        words = ["--dry-run", "--vipu-server-host", "s", "--vipu-server-port=1", "--reset-partition=no", "echo"]
        main(words)
        assert "without effect" not in capfd.readouterr().err
        main(["-v", *words])
        (note,) = [line for line in capfd.readouterr().err.splitlines() if "without effect" in line]
        assert note.endswith("simulated: --vipu-server-host, --vipu-server-port, --reset-partition")

    def test_deprecated_options_get_a_warning(self, capfd):
        assert main(["--dry-run", "--numa-aware", "yes", "echo"]) == 0
        assert "POPRUN [W] --numa-aware is deprecated" in capfd.readouterr().err

    def test_the_partition_variable_is_used_without_the_option(self, capfd, monkeypatch):
        monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p")
        for words, name in (([], "p"), (["--vipu-partition=q"], "q")):
            assert main(["--dry-run", "--json", *words, "echo"]) == 0
            (instance,) = json.loads(capfd.readouterr().out)["instances"]
            assert instance["device"] == 0
            assert instance["environment"]["IPUOF_VIPU_API_PARTITION_ID"] == name

    def test_an_unknown_log_level_gets_a_warning(self, capfd, monkeypatch):
        monkeypatch.setenv("POPRUN_LOG_LEVEL", "loud")
        assert main(["--dry-run", "echo"]) == 0
        assert "[W] POPRUN_LOG_LEVEL is 'loud', which is no log level; use one of ERROR, WARN" in capfd.readouterr().err

    def test_debug_lists_the_options_in_force(self, capfd):
        main(["--debug", "--dry-run", "--num-replicas=2", "echo"])
        assert "POPRUN [D] option --num-replicas: 2" in capfd.readouterr().err

    def test_an_exported_configuration_gives_the_same_plan(self, capfd, tmp_path):
        file = str(tmp_path / "job.toml")
        main(["--dry-run", "--export-config", file, *self.WORDS, "echo", "x"])
        first = capfd.readouterr()
        assert main(["--dry-run", "--import-config", file]) == 0
        assert capfd.readouterr() == first

    def test_an_existing_export_file_is_refused_before_any_host_is_asked(self, capfd, tmp_path):
        (tmp_path / "f").write_text("")
        words = ["--allow-run-as-root=yes", "--export-config", str(tmp_path / "f"), *self.WORDS, "echo"]
        assert main(words) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.endswith("f exists; give --overwrite-config yes, or another name to --export-config")

    def test_an_impossible_job_exports_nothing(self, tmp_path):
        assert main(["--export-config", str(tmp_path / "f"), *self.WORDS, "-H", "c", "echo"]) == 2
        assert list(tmp_path.iterdir()) == []


def test_a_dry_run_changes_files_seldom_for_a_reader_who_follows_its_calls():
    """The first 400 calls of a dry run change the file at most 74 times, among 28 files; that many with Python 3.13."""
    files: list[str] = []
    folder = f"{Path(main.__code__.co_filename).parent}/"

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        main(["--dry-run", "--num-instances", "2", "--num-replicas", "4", "echo"])
    finally:
        sys.setprofile(None)
    way = files[:400]
    assert 1 + sum(one != other for one, other in zip(way, way[1:], strict=False)) <= 74
    assert len(set(way)) <= 28
