"""Restarts of failed jobs and their messages, with scripted launches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from popdist.records.faults import ATTEMPT_VARIABLE
from poprun.cli.log import Log
from poprun.cli.settings import LaunchSettings
from poprun.ipc.facts import JobEnd, Verdict
from poprun.launch.launch import Launch
from poprun.launch.plan import plan_launch
from poprun.supervisor.restarts import Restarts

GOOD = JobEnd(0, False, None)


def failed(line: str, is_of_hosts: bool = False, was_told: bool = False, lost: tuple[int, ...] = ()) -> JobEnd:
    return JobEnd(9, was_told, Verdict(None, 9, (line, "more"), is_of_hosts=is_of_hosts, lost=lost))


@dataclass
class Job:
    """A job whose launches end as scripted; poprun's messages go to a file."""

    said: Path
    environ: dict[str, str]
    launches: list[Launch] = field(default_factory=list)

    def run(self, ends: Sequence[JobEnd], pause: Callable[[float], None] = lambda _: None, **options: object) -> JobEnd:
        """Run one launch for each of the ends, and return the end of the last launch."""
        settings = LaunchSettings(
            allow_run_as_root=True,
            program=("echo",),
            **{"num_instances": 2, "num_replicas": 4, "on_failure": "restart", "restart_backoff_s": 0, **options},
        )
        rest = iter(ends)

        def run_once(launch: Launch) -> JobEnd:
            self.launches.append(launch)
            return next(rest)

        with self.said.open("w") as file:
            log = Log(descriptor=file.fileno())
            ended = Restarts(self.environ, log, pause).run(plan_launch(settings, self.environ, log), run_once)
        assert list(rest) == []
        return ended

    @property
    def lines(self) -> list[str]:
        """Return the messages without their times."""
        return [line.partition(" POPRUN ")[2] for line in self.said.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "said", dict(os.environ))


def test_a_job_that_completes_is_not_restarted(job: Job) -> None:
    assert job.run([GOOD]) == GOOD
    assert job.lines == []
    assert [launch.extra[ATTEMPT_VARIABLE] for launch in job.launches] == ["0"]


def test_a_job_that_completes_after_restarts_lists_their_causes(job: Job) -> None:
    assert job.run([failed("one was lost"), failed("another one was lost"), GOOD]) == GOOD
    assert [launch.extra[ATTEMPT_VARIABLE] for launch in job.launches] == ["0", "1", "2"]
    here = job.launches[0].hosts[0].name
    assert job.lines == [
        f"[W] restart 1 of 3: 2 instances on {here}",
        f"[W] restart 2 of 3: 2 instances on {here}",
        "[W] the job completed after 2 restarts: one was lost; another one was lost",
    ]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_job_is_given_up_after_max_restarts(job: Job, most: int) -> None:
    last = failed("the last one")
    assert job.run([*[failed("an earlier one")] * most, last], max_restarts=most) == last
    restarts = "1 restart" if most == 1 else f"{most} restarts"
    assert job.lines[most:] == [f"[E] gave up after {restarts} (--max-restarts {most})"]


def test_a_job_ended_by_the_user_is_not_restarted(job: Job) -> None:
    told = failed("poprun was told to end", was_told=True)
    assert job.run([told]) == told
    assert job.lines == []


def test_a_job_ended_by_the_user_after_a_restart_has_not_completed(job: Job) -> None:
    told = failed("poprun was told to end", was_told=True)
    assert job.run([failed("one was lost"), told]) == told
    assert not any("completed" in line for line in job.lines)


class TestShrink:
    def test_a_failure_of_an_instance_is_final(self, job: Job) -> None:
        assert job.run([failed("one failed")], on_failure="shrink").exit_status == 9

    def test_the_loss_of_a_host_causes_a_restart(self, job: Job) -> None:
        assert job.run([failed("a host was lost", is_of_hosts=True), GOOD], on_failure="shrink") == GOOD
        assert job.lines[-1] == "[W] the job completed after 1 restart: a host was lost"


class TestOnSeveralHosts:
    """Hosts answer if the program in place of ssh says so."""

    OPTIONS = {"host": ("a,b,c",), "num_instances": 6, "num_replicas": 12, "dry_run": True}

    @pytest.fixture
    def silent(self, job: Job, tmp_path: Path) -> Path:
        """Provide the file with the names of unresponsive hosts."""
        hosts, ssh = tmp_path / "silent", tmp_path / "bin" / "ssh"
        hosts.touch()
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n! grep -q "$2" {hosts}\n')
        ssh.chmod(0o755)
        job.environ["PATH"] = f"{ssh.parent}:{job.environ['PATH']}"
        return hosts

    @pytest.fixture
    def two_slots_each(self, tmp_path: Path) -> dict[str, object]:
        """Provide options for hosts with two slots each."""
        hosts = tmp_path / "hosts"
        hosts.write_text("".join(f"{name} slots=2\n" for name in "abc"))
        return {**self.OPTIONS, "host": (), "hostfile": str(hosts)}

    @staticmethod
    def used(job: Job) -> list[list[str]]:
        return [[host.name for host in launch.hosts] for launch in job.launches]

    def test_the_answering_hosts_take_all_instances(self, job: Job, silent: Path) -> None:
        silent.write_text("b\n")
        job.run([failed("host b was lost", lost=(2, 3)), GOOD], **self.OPTIONS)
        assert self.used(job) == [["a", "b", "c"], ["a", "c"]]
        assert job.launches[1].settings.num_instances == 6
        assert job.lines[0] == "[W] restart 1 of 3: 6 instances on a, c"

    def test_a_host_on_which_the_job_failed_twice_is_left_out(self, job: Job, silent: Path) -> None:
        on_b = failed("instance 2 was lost", lost=(2,))
        everywhere = failed("all were lost", lost=tuple(range(6)))
        job.run([on_b, everywhere, on_b, GOOD], **self.OPTIONS)
        assert self.used(job) == [["a", "b", "c"]] * 3 + [["a", "c"]]

    def test_a_host_is_kept_if_the_others_are_too_few(
        self, job: Job, silent: Path, two_slots_each: dict[str, object]
    ) -> None:
        on_b = failed("instance 2 was lost", lost=(2,))
        job.run([on_b, on_b, GOOD], **two_slots_each, min_instances=6)
        assert self.used(job) == [["a", "b", "c"]] * 3

    def test_too_few_answering_hosts_end_the_job(
        self, job: Job, silent: Path, two_slots_each: dict[str, object]
    ) -> None:
        silent.write_text("a\nc\n")
        last = failed("hosts were lost")
        assert job.run([last], **two_slots_each, min_instances=3) == last
        assert job.lines == [
            "[E] cannot restart: hosts a, c do not answer, and the other hosts have no room for 3 or more of the "
            "instances (--min-instances)"
        ]

    def test_too_few_slots_end_the_job_although_all_hosts_answer(self, job: Job, silent: Path, tmp_path: Path) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text("a slots=3\nb slots=3\nc slots=3\n")
        last = failed("instance 2 was lost", lost=(2,))

        def shrink_the_hosts(_: float) -> None:
            hosts.write_text("a slots=1\nb slots=1\n")

        options = {**self.OPTIONS, "host": (), "hostfile": str(hosts)}
        assert job.run([last], pause=shrink_the_hosts, **options, min_instances=3) == last
        assert job.lines == [
            "[E] cannot restart: the hosts have no room for 3 or more of the instances (--min-instances)"
        ]
