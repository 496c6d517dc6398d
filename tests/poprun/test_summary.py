"""The summary of a finished job: numbers, lines, and the file."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from job_scripts import BEGIN_S, Script, exited, killed, running
from pages import page_text

from popdist.records.progress import Made, ProgressRecord
from poprun.cli.command_line import CommandLine, settings_from
from poprun.cli.log import Level
from poprun.cli.settings import SummaryAsked
from poprun.errors import UsageError
from poprun.ipc.facts import Carriers, Facts, JobEnd, Loss, Verdict
from poprun.monitor.attempts import LEAST_DIFFERENCE, Attempt, Slowest, add_up
from poprun.monitor.summary import describe_job, make_room, summary_lines, write_summary
from poprun.supervisor.job_events import ProgressCame

MIB = 2**20
GOOD = JobEnd(0, False, None)
FAILED = JobEnd(137, False, Verdict(1, 137, ("instance 1 was killed", "more")))


def made(waited_s: float = 0.0, steps: int = 101, seconds: float = 10.0, samples: int = 32) -> Made:
    """Return the record of `steps` steps; the first one is not timed."""
    timed = steps - 1
    return Made(steps, steps * samples, timed, timed * samples, 5.0, 5.0 + seconds, waited_s, 0.25)


def facts(index: int, of: Made, peak_mib: int = 100, host: str = "node0") -> Facts:
    record = ProgressRecord(step=of.steps, made=of)
    return Facts(index, host, 77, exited(), record, peak_memory_bytes=peak_mib * MIB)


def attempt(*all_made: Made, ended: JobEnd = GOOD, losses: tuple[Loss, ...] = ()) -> Attempt:
    all_facts = tuple(facts(index, each) for index, each in enumerate(all_made))
    return Attempt(all_facts, 12.0, ended, losses, (Carriers(0.0, 0, tuple(range(len(all_made)))),))


class TestNumbers:
    def test_steps_count_one_instance_and_samples_count_all(self):
        totals = add_up([attempt(made(), made())])
        assert (totals.steps, totals.samples) == (101, 2 * 101 * 32)
        assert totals.steps_per_s == pytest.approx(10.0)
        assert totals.samples_per_s == pytest.approx(640.0)

    def test_the_waiting_share_is_relative_to_the_time_of_all_instances(self):
        assert add_up([attempt(made(1.0), made(3.0))]).waiting_share == pytest.approx(0.2)

    def test_the_slowest_instance_is_the_one_that_waits_least(self):
        slowest = add_up([attempt(made(4.0), made(0.5), made(3.0))]).slowest
        assert slowest == Slowest(1, "node0", pytest.approx(0.05), pytest.approx(0.35))

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_no_instance_is_slowest_if_all_wait_alike(self, count):
        waits = [10.0 * (0.1 + 0.9 * LEAST_DIFFERENCE * each / count) for each in range(count)]
        assert add_up([attempt(*map(made, waits))]).slowest is None

    def test_an_instance_lost_early_is_not_compared(self):
        assert add_up([attempt(made(4.0), made(0.0, steps=10, seconds=1.0), made(4.0))]).slowest is None

    def test_rates_need_two_steps(self):
        totals = add_up([attempt(Made(1, 32, 0, 0, 5.0, 5.0), Made(1, 32, 0, 0, 5.0, 5.0))])
        assert (totals.steps, totals.steps_per_s, totals.waiting_share, totals.slowest) == (1, None, None, None)

    def test_attempts_are_added_up(self):
        first = attempt(made(1.0), made(1.0), ended=FAILED)
        totals = add_up([first, attempt(made(0.0, steps=301), made(0.0, steps=301))])
        assert (totals.steps, totals.samples) == (402, 2 * 402 * 32)
        assert totals.steps_per_s == pytest.approx(20.0)
        assert totals.waiting_share == pytest.approx(2 / 40)
        assert totals.survived == ((0, "restart", "instance 1 was killed"),)

    def test_the_fault_that_ends_the_job_is_not_survived(self):
        assert add_up([attempt(made(), ended=FAILED, losses=(Loss("lost", 1),))]).survived == ((0, "shrink", "lost"),)


class TestLines:
    def test_a_training_job_gets_three_lines(self):
        first = attempt(made(4.0), made(0.5), losses=(Loss("instance 2 was killed", 2),))
        first = replace(first, facts=(*first.facts[:1], replace(first.facts[1], peak_memory_bytes=2000 * MIB)))
        assert summary_lines([first], 65.4) == [
            "summary: 2 instances ran for 1 min 5 s; 101 steps, 10.0 steps/s, 640 samples/s",
            "summary: waiting for others: 22 % of the time of steps; the slowest is instance 1 on host node0 "
            "(it waited 5 %, the others 40 %); survived 1 fault",
            "summary: peak memory 100 MiB (instance 0), 2.0 GiB (instance 1)",
        ]

    def test_spares_and_changes_of_the_carriers_are_told(self):
        losses = (Loss("instance 1 was killed", 1, taken_by=2),)
        carriers = (Carriers(0.0, 0, (0, 1)), Carriers(12.3, 5, (0, 2)))
        lines = summary_lines([replace(attempt(*[made(1.0)] * 4, losses=losses), carriers=carriers)], 20.0)
        assert lines[0].startswith("summary: 2 instances and 2 spares ran for 20 s; ")
        assert lines[2] == "summary: replicas on instances 0-1; from step 5 (12 s) on instances 0, 2"

    def test_the_last_of_many_changes_of_the_carriers_are_told(self):
        carriers = tuple(Carriers(float(number), number, (number,)) for number in range(12))
        line = summary_lines([replace(attempt(made()), carriers=carriers)], 20.0)[-2]
        assert line.startswith("summary: replicas on instances 0; 3 earlier changes; from step 4 (4.0 s) on instances")
        assert line.count("from step") == 8

    def test_a_program_without_steps_gets_duration_and_memory(self):
        assert summary_lines([attempt(Made(), Made())], 0.42) == [
            "summary: 2 instances ran for 0.4 s",
            "summary: peak memory 100 MiB (instances 0-1)",
        ]

    def test_a_job_that_never_started_gets_one_line(self):
        never = Attempt((Facts(0),), 1.0, FAILED)
        assert summary_lines([never], 1.0) == ["summary: 1 instance ran for 1.0 s"]

    def test_sums_over_attempts_are_marked_as_such(self):
        lines = summary_lines([attempt(made(), ended=FAILED), attempt(made())], 7300.0)
        assert lines[0] == (
            "summary: 1 instance ran for 2 h 1 min in 2 attempts; 202 steps (of all attempts), 10.0 steps/s, "
            "320 samples/s"
        )
        assert lines[1].endswith("; survived 1 fault")

    def test_the_memory_of_many_instances_is_shown_as_a_range(self):
        many = Attempt(tuple(facts(each, made(), peak_mib=100 + each) for each in range(64)), 1.0, GOOD)
        assert summary_lines([many], 1.0)[2] == "summary: peak memory 100 MiB to 163 MiB, the highest in instance 63"


class TestSummaryOption:
    @pytest.mark.parametrize(
        ("text", "asked"),
        [
            ("", SummaryAsked()),
            ("yes", SummaryAsked(lines=True)),
            ("ON", SummaryAsked(lines=True)),
            ("no", SummaryAsked(lines=False)),
            ("json:a:b.json", SummaryAsked(file="a:b.json")),
        ],
    )
    def test_the_option_is_read(self, text, asked):
        assert SummaryAsked.read(text) == asked

    @pytest.mark.parametrize("text", ["json", "json:", "out.json", "maybe"])
    def test_an_invalid_value_is_refused_with_the_settings(self, text):
        with pytest.raises(UsageError, match=f"--summary is '{text}'; use yes, no or json:FILE"):
            settings_from(CommandLine({"summary": text}, ("p",)))

    @pytest.mark.parametrize(
        ("asked", "is_terminal", "level", "term", "shows"),
        [
            (SummaryAsked(), True, Level.WARN, "xterm", True),
            (SummaryAsked(), False, Level.WARN, "xterm", False),
            (SummaryAsked(), True, Level.ERROR, "xterm", False),
            (SummaryAsked(), True, Level.WARN, "dumb", False),
            (SummaryAsked(lines=True), False, Level.ERROR, "dumb", True),
            (SummaryAsked(lines=False), True, Level.TRACE, "xterm", False),
            (SummaryAsked(file="f"), True, Level.WARN, "xterm", True),
        ],
    )
    def test_lines_are_shown_on_a_terminal_unless_the_user_decides(self, asked, is_terminal, level, term, shows):
        assert asked.shows_lines(is_terminal, level, {"TERM": term}) is shows


class TestFile:
    WHOLE = {"program": ["python", "train-\udcff.py"], "began_at_s": 1.7e9, "duration_s": 20.0, "exit_status": 0}

    def test_the_file_has_all_attempts_and_instances(self, tmp_path: Path):
        last = replace(facts(1, made(0.5), host="node1"), ending=None, is_given_up=True)
        attempts = [
            attempt(made(4.0), ended=FAILED),
            Attempt((facts(0, made(4.0)), last), 8.0, GOOD, (Loss("lost", 1),)),
        ]
        file = tmp_path / "job.json"
        write_summary(str(file), describe_job(self.WHOLE, attempts))
        read = json.loads(file.read_text())
        assert (read["version"], read["program"]) == (1, ["python", "train-\udcff.py"])
        assert (read["duration_s"], read["exit_status"], read["failure"]) == (20.0, 0, None)
        assert read["faults_survived"] == [
            {"attempt": 0, "followed_by": "restart", "fault": "instance 1 was killed"},
            {"attempt": 1, "followed_by": "shrink", "fault": "lost"},
        ]
        assert read["attempts"][0]["carriers"] == [{"at_s": 0.0, "step": 0, "instances": [0]}]
        assert read["slowest"]["instance"] == 1
        assert [each["failure"] for each in read["attempts"]] == ["instance 1 was killed", None]
        first, second = read["attempts"][1]["instances"]
        assert (first["end"], second["end"], second["is_given_up"]) == ("ended with exit status 0", None, True)
        assert second["waiting_share"] == pytest.approx(0.05)
        assert second["peak_memory_bytes"] == 100 * MIB
        assert [path.name for path in tmp_path.iterdir()] == ["job.json"]

    def test_a_loss_that_is_nan_becomes_null(self, tmp_path: Path):
        file = tmp_path / "job.json"
        write_summary(str(file), describe_job(self.WHOLE, [attempt(replace(made(), loss=math.nan))]))
        assert json.loads(file.read_text())["attempts"][0]["instances"][0]["loss"] is None

    def test_an_earlier_file_is_removed_and_missing_folders_are_made(self, tmp_path: Path):
        file = tmp_path / "new" / "job.json"
        make_room(str(file))
        file.write_text("old")
        make_room(str(file))
        assert list(file.parent.iterdir()) == []

    def test_an_impossible_file_is_refused_before_the_job(self, tmp_path: Path):
        with pytest.raises(UsageError, match="cannot be written: it is a folder; name another file"):
            make_room(str(tmp_path))
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="name another file"):
            make_room(str(tmp_path / "file" / "job.json"))

    def test_the_page_documents_every_key(self):
        """The documentation is the contract of the file."""
        page = page_text("summary_json.md")
        described = describe_job(self.WHOLE, [attempt(made(4.0), made(0.5), ended=FAILED), attempt(made())])
        attempts = described["attempts"]
        keys = {*described, *attempts[0], *attempts[0]["instances"][0], *described["faults_survived"][0]}
        keys |= set(attempts[0]["slowest"]) | set(attempts[0]["carriers"][0])
        assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


class TestSummaryOfASimulatedJob:
    """The summary agrees with the final state of the job machine."""

    def job(self, **across) -> Script:
        script = Script(3, **across)
        for index, each in enumerate(script.instances):
            each.record = running(made=made(4.0 if index else 0.5))
        for index in range(3):
            script.at(1.0, ProgressCame(index, script.instances[index].record, False, 0.0, 50 * MIB, 90 * MIB))
        return script

    def attempt(self, script: Script) -> Attempt:
        return Attempt(tuple(script.machine.facts), script.now_s - BEGIN_S, script.ended, tuple(script.machine.losses))

    def test_a_job_that_ends_well_is_summarised(self):
        script = self.job()
        for index in range(3):
            script.end(30.0, index, exited())
        script.run()
        totals = add_up([self.attempt(script)])
        assert totals.slowest is not None
        assert (totals.steps, totals.slowest.instance, totals.survived) == (101, 0, ())

    def test_a_survived_loss_is_listed(self):
        script = self.job(least=1)
        script.end(5.0, 2, killed())
        for index in range(2):
            script.end(30.0, index, exited())
        script.run()
        attempt = self.attempt(script)
        ((number, followed_by, line),) = add_up([attempt]).survived
        assert (number, followed_by) == (0, "shrink")
        assert line.startswith("instance 2 on host node0 (pid 102) was killed by SIGKILL")
        assert (attempt.failure, attempt.ended.exit_status, attempt.facts[2].is_given_up) == ("", 0, True)

    def test_an_end_by_the_user_is_the_failure(self):
        script = self.job()
        for each in script.instances:
            each.after_signal = (0.1, killed(signal.SIGINT))
        script.interrupt(5.0, signal.SIGINT)
        script.run()
        attempt = self.attempt(script)
        assert attempt.failure == "poprun received SIGINT and ended all instances"
        assert add_up([attempt]).steps == 101
        assert add_up([attempt]).survived == ()

    def test_the_last_known_numbers_of_a_lost_host_are_kept(self):
        script = self.job(others=("node1",), interface="10.0.0.1")
        script.lose(5.0, 2, fault="Connection timed out")
        script.run()
        assert self.attempt(script).facts[2].record.made.steps == 101
        assert add_up([self.attempt(script)]).peak_memory_bytes >= 0
