"""The choice of the instance to blame for a failure, and the text about it."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from popdist.records.progress import ProgressRecord, State
from poprun.cli.wording import list_instances
from poprun.ipc.facts import Ending, EndKind, Facts, Verdict
from poprun.supervisor.diagnosis import (
    KEPT_BYTES,
    MOST_LINES,
    LastLines,
    find_exception,
    find_stuck,
    first_cause,
    has_failed,
    innermost_line,
    judge,
    judge_missing,
    judge_stuck,
    vain_waits,
)

HERE = "node0"
UNUSED = ProgressRecord()
Instance = tuple[Ending | None, ProgressRecord]


def exited(status: int, at_s: float = 10.0, told: bool = False) -> Ending:
    return Ending(EndKind.EXIT, status, at_s, told)


def killed(number: int = 9, at_s: float = 10.0, told: bool = False) -> Ending:
    return Ending(EndKind.SIGNAL, number, at_s, told)


def lost(at_s: float = 10.0, fault: str = "") -> Ending:
    return Ending(EndKind.LOST, 0, at_s, fault=fault)


def in_state(state: State, *waiting_for: int, number: int = 4, since_s: float = 1.0) -> ProgressRecord:
    return ProgressRecord(3, number, "barrier", state, since_s, waiting_for)


def running(number: int = 4, since_s: float = 1.0) -> ProgressRecord:
    return in_state(State.RUNNING, number=number, since_s=since_s)


def inside(*waiting_for: int, number: int = 5) -> ProgressRecord:
    return ProgressRecord(3, number, "all_reduce 'gradients'", State.IN_COLLECTIVE, 1.0, waiting_for)


def leaving(number: int = 4) -> ProgressRecord:
    return in_state(State.LEAVING, number=number)


def job(*instances: Instance) -> list[Facts]:
    return [
        Facts(index, f"node{index}", 100 + index, ending, record) for index, (ending, record) in enumerate(instances)
    ]


def verdict_on(*instances: Instance) -> Verdict:
    facts = job(*instances)
    verdict = judge(facts, HERE, vain_waits(facts))
    assert verdict is not None
    return verdict


class TestFirstCause:
    CASES = {
        "the only failure": (1, (None, inside(1)), (exited(3), running())),
        "the earliest": (1, (exited(1, 11.0), running()), (exited(2, 10.0), running())),
        "a signal of the same moment": (1, (exited(1, 10.0), running()), (killed(9, 10.02), running())),
        "an exit before a signal": (0, (exited(1, 10.0), running()), (killed(9, 10.2), running())),
        "waited for by a victim": (1, (exited(1, 10.0), inside(1)), (exited(7, 10.3), running())),
        "the end of a chain": (
            2,
            (exited(1, 10.0), inside(1)),
            (exited(1, 10.1), inside(2)),
            (exited(1, 10.2), running()),
        ),
        "left with status 0": (0, (exited(0, 9.0), leaving()), (exited(1, 10.0), inside(0))),
        "left, for too short a wait": (0, (exited(0, 9.0), leaving(4)), (exited(1, 10.0), inside(number=5))),
        "an error outside collectives": (1, (exited(0, 9.0), leaving()), (exited(1, 10.0), running())),
        "a signal inside": (1, (exited(0, 9.0), leaving()), (killed(), inside(0))),
        "a time-out for one that lives": (0, (exited(1), inside(1)), (None, running())),
        "not told to stop": (1, (killed(9, 9.0, told=True), inside()), (exited(1, 10.0), running())),
        "an own end after MPI_Abort": (
            1,
            (killed(9, 10.0, told=True), inside()),
            (exited(5, 9.9, told=True), running()),
        ),
        "nobody when all were told": (None, (killed(told=True), inside()), (killed(told=True), inside())),
        "a lost agent": (1, (None, inside(1)), (lost(), running())),
        "all had come": (0, (exited(1), inside()), (exited(0), running(number=5))),
        "no record of the others": (0, (exited(1), inside()), (exited(0), UNUSED)),
        "through one that leaves and waits": (
            2,
            (exited(1), inside(1)),
            (None, in_state(State.LEAVING_INSIDE, 2)),
            (killed(at_s=10.2), running()),
        ),
        "the first of several to go": (
            2,
            (exited(1), inside(1, 2)),
            (exited(0, 9.0), running(since_s=5.0)),
            (exited(0, 8.0), running(since_s=6.0)),
        ),
    }

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_the_first_cause_of_each_case_is_blamed(self, case):
        expected, *instances = case
        facts = job(*instances)
        assert first_cause(facts) == expected
        assert has_failed(facts) == any(ending and ending.is_own_failure for ending, _ in instances)

    def test_blame_does_not_go_round_in_circles(self):
        assert first_cause(job((exited(1, 10.0), inside(1)), (exited(1, 10.1), inside(0)))) in (0, 1)

    def test_a_vain_wait_alone_blames_the_instance_that_left(self):
        facts = job((exited(0), leaving()), (None, inside(0)))
        assert first_cause(facts, vain_waits(facts)) == 0
        assert first_cause(facts) is None

    @pytest.mark.parametrize(
        ("given_up", "expected", "instances"),
        [
            (1, 2, [(exited(0), running()), (killed(at_s=5.0), running()), (exited(7, at_s=20.0), running())]),
            (1, 1, [(exited(1, at_s=20.0), inside(1)), (killed(at_s=5.0), running())]),
            (0, 1, [(exited(3, at_s=5.0), running()), (exited(14, told=True), running())]),
        ],
        ids=["a later failure", "the others cannot do without it", "another one ended by itself"],
    )
    def test_the_first_cause_after_a_survived_loss_is_blamed(self, given_up, expected, instances):
        facts = job(*instances)
        facts[given_up] = replace(facts[given_up], is_given_up=True)
        assert first_cause(facts) == expected

    def test_an_instance_that_was_given_up_does_not_count_as_a_failure_again(self):
        facts = job((None, inside(1)), (killed(), running()))
        assert has_failed(facts)
        facts[1] = replace(facts[1], is_given_up=True)
        assert not has_failed(facts)


class TestVainWaits:
    @pytest.mark.parametrize("gone", [(exited(0), running()), (None, leaving())])
    def test_an_instance_that_ended_well_or_exits_causes_a_vain_wait(self, gone):
        assert vain_waits(job(gone, (None, inside(0)))) == {(1, 0, 5)}

    @pytest.mark.parametrize(
        "instances",
        [
            [(None, running()), (None, inside(0))],
            [(exited(0), running()), (None, running())],
            [(exited(0), running()), (None, inside())],
            [(exited(0), leaving()), (None, leaving())],
            [(exited(0), running()), (exited(0), inside(0))],
            [(None, in_state(State.RUNNING, 1)), (exited(0), running())],
            [(None, in_state(State.LEAVING, 1)), (exited(0), running())],
            [(None, in_state(State.LEAVING_INSIDE, 1)), (exited(0), running())],
        ],
    )
    def test_other_waits_are_not_in_vain(self, instances):
        assert vain_waits(job(*instances)) == frozenset()


class TestVerdict:
    def test_the_verdict_names_instance_host_end_and_collectives(self):
        verdict = verdict_on((None, inside(1)), (exited(3), running()), (None, inside(1)))
        assert (verdict.instance, verdict.exit_status) == (1, 3)
        assert verdict.lines == (
            "instance 1 on host node1 (pid 101) ended with exit status 3 in step 3, after collective 4, barrier",
            "instances 0, 2 were in collective 5, all_reduce 'gradients', step 3, waiting for instance 1",
        )

    @pytest.mark.parametrize(
        ("ending", "record", "status", "text"),
        [
            (
                killed(11),
                inside(),
                139,
                "was killed by SIGSEGV in step 3, inside collective 5, all_reduce 'gradients'",
            ),
            (exited(1), UNUSED, 1, "ended with exit status 1"),
            (exited(1), ProgressRecord(3, 0, "", State.RUNNING, 1.0), 1, "ended with exit status 1 in step 3"),
            (
                lost(),
                running(),
                137,
                "was lost: its supervisor process was killed or cut off; last heard of in step 3, after collective 4, "
                "barrier",
            ),
        ],
        ids=["a signal", "without a record", "before the first collective", "a lost agent"],
    )
    def test_the_verdict_is_one_line_if_nobody_waits(self, ending, record, status, text):
        verdict = verdict_on((ending, record), (None, UNUSED))
        assert (verdict.exit_status, verdict.lines) == (status, (f"instance 0 on host node0 (pid 100) {text}",))

    @pytest.mark.parametrize(
        ("ending", "record", "is_aborted"),
        [
            (exited(14), UNUSED, True),
            (exited(14), ProgressRecord(0, 0, "", State.JOINING, 1.0), True),
            (exited(14), inside(0), True),
            (exited(14), running(), False),
            (exited(3), running(), False),
            (exited(1), UNUSED, False),
            (exited(1), ProgressRecord(0, 0, "", State.JOINING, 1.0), False),
            (killed(11), UNUSED, False),
        ],
    )
    def test_an_end_that_open_mpi_may_have_caused_is_unexplained(self, ending, record, is_aborted):
        """Such an end happens when one host cannot connect to another."""
        facts = job((None, inside(1)), (None, UNUSED), (ending, record))
        assert judge(facts, HERE).is_unexplained is is_aborted
        assert not judge([replace(each, host="node0") for each in facts], HERE).is_unexplained

    def test_a_premature_end_names_only_instances_that_still_needed_the_one_that_left(self):
        verdict = verdict_on(
            (exited(0), leaving()),
            (None, inside(0)),
            (None, inside()),  # its wait is too short for a note, and instance 0 has not arrived
            (None, running()),
            (None, inside(1)),
            (None, inside(number=4)),  # instance 0 has arrived at collective 4
            (None, in_state(State.RUNNING, 0)),  # an earlier wait
        )
        assert verdict.exit_status == 1
        assert verdict.lines[0] == (
            "instance 0 on host node0 (pid 100) ended with exit status 0 too early: instances 1-2 still needed it"
        )

    def test_the_verdict_has_a_limited_number_of_lines(self):
        assert len(verdict_on((exited(1), running()), *[(None, inside(0, number=n)) for n in range(40)]).lines) == (
            MOST_LINES
        )

    def test_exit_status_15_is_not_taken_for_sigterm(self):
        facts = job((exited(15), running()), (None, running()))
        facts[0] = replace(facts[0], told_at_s=9.0)
        verdict = judge(facts, HERE)
        assert (verdict.instance, verdict.exit_status) == (0, 15)

    def test_a_broken_connection_is_a_fault_of_the_hosts(self):
        assert verdict_on((None, inside(1)), (lost(fault="Connection timed out"), running())).is_of_hosts
        assert not verdict_on((None, inside(1)), (killed(), running())).is_of_hosts


class TestAHostWithoutItsDaemon:
    """Instances 2 and 3 run on host b; Open MPI makes instance 0 on host a fail."""

    def facts(self, told_at_s, victim=None, record=None):
        ends = [victim or exited(14, 10.0), None, None, None]
        record = record or inside()
        return [Facts(index, "aabb"[index], 100 + index, ends[index], record, told_at_s[index]) for index in range(4)]

    def test_the_host_is_named_with_its_instances(self):
        verdict = judge(self.facts((0.0, 0.0, 9.9, 9.8)), "a")
        assert (verdict.instance, verdict.exit_status) == (None, 1)
        assert verdict.lines[0] == "host b has lost its daemon of Open MPI, and with it instances 2-3"

    @pytest.mark.parametrize(
        "told_at_s", [(0.0, 0.0, 0.0, 9.9), (9.9, 9.9, 9.9, 9.9), (0.0, 10.1, 10.1, 10.1), (0.0, 0.0, 9.9, 10.1)]
    )
    def test_a_host_whose_instances_were_told_later_or_not_alone_is_not_blamed(self, told_at_s):
        assert judge(self.facts(told_at_s), "a").instance == 0

    @pytest.mark.parametrize("options", [{"record": running()}, {"victim": killed()}])
    def test_an_instance_that_failed_by_itself_is_blamed_instead(self, options):
        assert judge(self.facts((0.0, 0.0, 9.9, 9.9), **options), "a").instance == 0

    def test_the_host_of_mpirun_is_never_blamed(self):
        assert judge(self.facts((0.0, 0.0, 9.9, 9.8)), "b") is None

    @pytest.mark.parametrize(
        ("orphaned_at_s", "host"),
        [((0.0, 0.0, 9.0), "c"), ((0.0, 9.1, 9.0), "c"), ((8.99, 9.0, 0.0), "b"), ((8.0, 9.0, 0.0), "")],
        ids=["the only one", "the first one", "at once with mpirun", "after mpirun"],
    )
    def test_the_host_whose_agents_were_orphaned_first_is_blamed(self, orphaned_at_s, host):
        """mpirun runs on host a; if a host is lost first, a later failure in a collective follows from that loss."""
        facts = [
            Facts(index, "abc"[index], 100 + index, killed(told=True), inside(), 9.0, at_s)
            for index, at_s in enumerate(orphaned_at_s)
        ]
        verdict = judge([*facts, Facts(3, "a", 103, exited(14, 8.5), inside())], "a")
        line = f"host {host} has lost its daemon of Open MPI, and with it instance {'abc'.find(host)}"
        assert verdict.lines[0].startswith(line) if host else verdict is None

    def test_the_job_ends_with_1(self):
        verdict = judge([Facts(0, HERE, 7), Facts(1, "b", 8, orphaned_at_s=5.0, told_at_s=5.0)], HERE)
        assert (verdict.instance, verdict.exit_status, verdict.lost) == (None, 1, (1,))


class TestAJobEndedByABatchSystem:
    """SIGTERM reaches instance 1 and its agent; instance 0 loses its connection to it."""

    def facts(self, victim=None, record=None, told=True):
        swept = Facts(1, "node1", 101, killed(15, 10.0, told), inside(), told_at_s=10.0)
        return [Facts(0, "node0", 100, victim or exited(14, 10.1), record or inside()), swept]

    @pytest.mark.parametrize("told", [True, False])
    def test_no_instance_is_blamed(self, told):
        assert judge(self.facts(told=told), HERE) is None
        assert judge_missing(self.facts(told=told), None).lines == (
            "the job was ended before every instance had completed",
            "instance 1 on host node1 had to stop because SIGTERM came to all processes there, "
            "as when a batch system ends a job",
        )

    def test_an_instance_that_failed_by_itself_is_blamed(self):
        assert judge(self.facts(exited(1), running()), HERE).instance == 0
        assert judge(self.facts(killed(9, 9.0)), HERE).instance == 0

    def test_sigterm_to_an_instance_alone_is_its_own_failure(self):
        assert verdict_on((None, inside()), (killed(15), UNUSED)).instance == 1


class TestAJobThatNoInstanceExplains:
    STOPPED = "had to stop because mpirun ordered it, or because mpirun or its daemon there has ended"

    @pytest.mark.parametrize(
        ("facts", "mpirun_status", "status", "lines"),
        [
            (
                [Facts(0, "h", 7, exited(0)), Facts(1, "h", 8), Facts(2), Facts(3)],
                213,
                213,
                [
                    "mpirun ended with 213 before every instance had completed",
                    "instances 2-3 never started",
                    "instance 1 on host h (pid 8) did not report how it ended",
                ],
            ),
            (
                [Facts(0, "h", 7), Facts(1)],
                None,
                1,
                [
                    "mpirun did not start every instance in time before every instance had completed",
                    "instance 1 never started",
                    "instance 0 on host h (pid 7) did not report how it ended",
                ],
            ),
            (
                [Facts(index, host, 7, exited(1, told=True)) for index, host in enumerate("abb")],
                None,
                1,
                [
                    "the job was ended before every instance had completed",
                    f"instance 0 on host a {STOPPED}",
                    f"instances 1-2 on host b {STOPPED}",
                ],
            ),
        ],
        ids=["mpirun ended", "not in time", "all had to stop"],
    )
    def test_the_verdict_says_how_mpirun_ended_and_lists_each_instance(self, facts, mpirun_status, status, lines):
        verdict = judge_missing(facts, mpirun_status)
        assert (verdict.instance, verdict.exit_status, verdict.is_unexplained) == (None, status, True)
        assert list(verdict.lines) == lines

    def test_the_job_ends_with_1_if_mpirun_ended_with_0(self):
        assert judge_missing([Facts(0, "h", 7)], 0).exit_status == 1


@pytest.mark.parametrize(
    ("indices", "text"),
    [([3], "instance 3"), ([0, 1, 2, 5], "instances 0-2, 5"), ([4, 2], "instances 2, 4"), ([0, 1], "instances 0-1")],
)
def test_lists_of_instances_are_shortened_to_ranges(indices, text):
    assert list_instances(indices) == text


class TestAnInstanceThatIsStuck:
    """Each record of `running` and `inside` began at 1 s."""

    CASES = {
        "waited for": (1, 11.0, (None, inside(1)), (None, running()), (None, inside(1))),
        "before one that waits itself": (2, 11.0, (None, inside(1)), (None, inside(2)), (None, running())),
        "inside the same collective": (1, 11.0, (None, inside(1)), (None, inside())),
        "they wait for each other": (1, 11.0, (None, inside(1)), (None, inside(0, number=4))),
        "though others leave and are busy": (
            1,
            11.0,
            (None, inside(1)),
            (None, running()),
            (None, leaving()),
            (None, running(since_s=9.0)),
        ),
        "does not come to the end": (1, 12.0, (None, leaving()), (None, running()), (exited(0), leaving())),
        "before the limit": (None, 10.9, (None, inside(1)), (None, running())),
        "has done something": (None, 11.0, (None, inside(1)), (None, running(since_s=5.0))),
        "nobody waits": (None, 100.0, (None, running()), (None, running())),
        "waited for before": (None, 11.0, (None, in_state(State.RUNNING, 1)), (None, running())),
        "has ended": (None, 100.0, (None, inside(1)), (exited(0), running())),
        "at the end, busy": (None, 12.0, (None, leaving()), (None, running(since_s=5.0))),
        "at the end, finished": (None, 12.0, (None, leaving()), (None, in_state(State.FINISHED))),
        "at the end, without a record": (None, 12.0, (None, leaving()), (None, UNUSED)),
        "at the end, ended": (None, 12.0, (None, leaving()), (exited(0), running())),
        "at the end, another is busy": (
            None,
            11.0,
            (None, leaving()),
            (None, running()),
            (None, running(since_s=5.0)),
        ),
    }

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_the_stuck_instance_of_each_case_is_found(self, case):
        expected, now_s, *instances = case
        assert find_stuck(job(*instances), now_s, 10.0) == expected

    def test_a_stopped_instance_is_blamed_before_one_that_waits_for_it(self):
        """The limit of the stop itself is over later, because an agent notices a stop at its next look."""
        facts = job((None, inside(1, 2)), (None, in_state(State.RUNNING, number=9)), (None, in_state(State.RUNNING)))
        assert find_stuck(facts, 11.0, 10.0) == 2
        facts[1] = replace(facts[1], stopped_since_s=1.2)
        assert find_stuck(facts, 11.0, 10.0) == 1

    def test_a_stuck_instance_is_told_apart_from_instances_at_the_end(self):
        facts = job((None, leaving()), (None, running()), (exited(0), leaving()))
        assert judge_stuck(facts, 1, 10.0).lines[1:] == ("instance 0 had reached the end of the program",)

    @pytest.mark.parametrize(
        ("state", "stack", "where"),
        [
            ("T", "", "stopped by a signal or a debugger"),
            ("R", 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f', "at a.py, line 3, in f"),
            ("S", "", "at an unknown place of its program"),
            ("", "", "at an unknown place of its program"),
        ],
    )
    def test_a_stuck_instance_is_described_by_its_state_and_stack(self, state, stack, where):
        facts = job((None, inside(1)), (None, running()))
        facts[1] = replace(facts[1], state=state, stack=stack)
        verdict = judge_stuck(facts, 1, 10.0)
        assert (verdict.instance, verdict.exit_status, verdict.lost) == (1, 124, (1,))
        assert verdict.lines == (
            "instance 1 on host node1 (pid 101) has made no progress for 10 s (--stuck-timeout-s) in step 3, after "
            f"collective 4, barrier: it is {where}",
            "instance 0 was in collective 5, all_reduce 'gradients', step 3, waiting for instance 1",
        )


MAIN = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/me/loader.py", line 5 in load

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/jax/core.py", line 7 in bind
  File "/home/me/my train.py", line 31 in forward
  File "/home/me/my train.py", line 80 in <module>
"""


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (MAIN, "/home/me/my train.py, line 31, in forward"),
        ('Current thread 0x1 (most recent call first):\n  File "<string>", line 3 in f\n', "<string>, line 3, in f"),
        (
            'Current thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/runpy.py", line 88 in _run\n',
            "/usr/lib/python3.11/runpy.py, line 88, in _run",
        ),
        ("", ""),
        ("\n", ""),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
    ],
    ids=["own code", "a command line", "only libraries", "empty", "no line", "no frame"],
)
def test_a_stack_is_described_by_the_innermost_line_of_the_program_in_its_main_thread(stack, line):
    assert innermost_line(stack) == line


DUMPING = """\
import faulthandler, sys, threading
is_over = threading.Event()
others = [threading.Thread(target=is_over.wait) for _ in range(int(sys.argv[1]))]
for other in others:
    other.start()
faulthandler.dump_traceback(sys.stdout, all_threads=True)
is_over.set()
"""


@pytest.mark.parametrize(("others", "line"), [(1, "<string>, line 6, in <module>"), (101, "")])
def test_the_main_thread_is_found_in_a_dump_of_faulthandler(others, line):
    """faulthandler shows a hundred threads, the newest first."""
    dump = subprocess.run([sys.executable, "-c", DUMPING, str(others)], capture_output=True, text=True, check=True)
    assert innermost_line(dump.stdout) == line


FAILED = Ending(EndKind.EXIT, 3, 1.0)
TRACE = b"""\
note
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    f()
    ^^^
ValueError: no such data: 5 rows
that is the second line of the message
"""


def cause(*pieces: bytes, ending: Ending | None = FAILED, count: int = 2, blamed: int | None = 1) -> str:
    lines = LastLines()
    lines.take(0, b"Traceback (most recent call last):\n  File\nLayoutMismatchError: of another one\n")
    for piece in pieces:
        lines.take(1, piece)
    facts = [Facts(index, "node0", 7, ending if index == 1 else None) for index in range(count)]
    return lines.describe_cause(Verdict(blamed, 3, ("line",)), facts)


def test_an_exception_is_shown_with_instance_and_status():
    expected = "first cause: instance 1 on host node0: ValueError: no such data: 5 rows (exit status 3)"
    assert cause(TRACE) == expected
    assert cause(*(bytes([each]) for each in TRACE)) == expected
    assert cause(TRACE, ending=None) == expected  # the instance has not ended yet


@pytest.mark.parametrize(
    ("program", "exception"),
    [
        ("raise SystemError", "SystemError"),
        ("try: 1 / 0\nexcept ZeroDivisionError: import missing_extra", "ModuleNotFoundError: No module named "),
        ("raise ValueError('a') from KeyError('b')", "ValueError: a"),
        ("f(", "SyntaxError: '(' was never closed"),
        ("class Own(Exception): pass\nraise Own('own')", "Own: own"),
    ],
)
def test_each_kind_of_python_exception_is_recognised(program, exception):
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60).stderr
    assert f"host node0: {exception}" in cause(b"before\n", shown)


def test_without_an_exception_the_last_line_is_shown():
    expected = "first cause: instance 1 on host node0 (exit status 3), which wrote last: this needs an extra"
    assert cause(b"first\n\nthis needs an extra\n") == expected
    assert cause(b"10 %\r20 %\rthis needs an extra\r\n") == expected
    assert cause(b"this needs an extra") == expected


def test_an_exception_caught_long_ago_is_not_shown():
    assert cause(TRACE, b"going on\n" * 30, b"no more\n").endswith("which wrote last: no more")


def test_long_tracebacks_and_invalid_bytes_do_no_harm():
    frames = b"Traceback (most recent call last):\n" + b'  File "x.py", line 1, in f\n    f()\n' * KEPT_BYTES
    assert cause(frames, b"RecursionError: \x1b[31m\xff" + b"x" * 1000).startswith(
        "first cause: instance 1 on host node0: RecursionError: ?[31m\N{REPLACEMENT CHARACTER}xxx"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"blamed": None},
        {"ending": Ending(EndKind.SIGNAL, signal.SIGKILL, 1.0)},
        {"ending": Ending(EndKind.EXIT, 0, 1.0)},
    ],
    ids=["nobody is to blame", "killed", "left too early"],
)
def test_no_cause_is_shown_for(options):
    assert cause(TRACE, **options) == ""


def test_a_job_of_one_instance_names_its_exception_and_no_collective():
    verdict = verdict_on((exited(3), running()))
    assert verdict.lines == ("instance 0 on host node0 (pid 100) ended with exit status 3 in step 3",)
    lines = LastLines()
    lines.take(0, b"beware\n")
    assert lines.describe_cause(verdict, job((exited(3), running()))) == ""  # that line stands just above
    lines.take(0, TRACE)
    assert lines.describe_cause(verdict, job((exited(3), running()))) == (
        "first cause: instance 0 on host node0: ValueError: no such data: 5 rows (exit status 3)"
    )


def test_no_cause_is_shown_if_nothing_was_written():
    assert cause() == ""
    assert cause(b"\n \n") == ""
    assert cause(b"a warning\n", ending=None) == ""


def test_warnings_are_not_taken_for_exceptions():
    assert find_exception(['  File "x.py", line 3', "    f()", "not an exception line"]) == ""
    assert find_exception(["x.py:3: UserWarning: beware", "  f()", "done"]) == ""
