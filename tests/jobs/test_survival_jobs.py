"""Loss of instances: the others take over the replicas and compute the same bits.

Each kind of loss occurs once, three of them in one job, and a ring saves checkpoints; all losses are real processes.
`tests/strategies/engines/test_losing_an_instance.py` has every kind in every phase, on threads, for every engine.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from poprun_jobs import Finished, start

import strategies
from popdist.timeline.asked import folder_beside
from poprun.trace.merging import to_be_judged
from poprun.trace.recordings import read_recordings
from poprun.trace.report.text import period_rows

PROGRAM = Path(__file__).parent / "programs" / "surviving_training.py"
sys.path.insert(0, str(PROGRAM.parent))
from surviving_training import Training  # noqa: E402
from surviving_training import train as train_here  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
STEPS = 4  # of each of two epochs

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.cores(2), pytest.mark.timeout(300)]


LIMIT_S = 150.0
STUCK_S = 10
"""Allows an instance this much time to compile in its first step, while the others wait."""


MESSAGES = {"POPDIST_MECHANISM": "ring"}
"""The environment of instances without shared memory, as on several hosts."""


def train(
    instances: int | str,
    replicas: int,
    *options: str,
    digest_every: int = 0,
    folder: str = "",
    environ: dict[str, str] | None = None,
) -> Finished:
    words = [sys.executable, str(PROGRAM), str(STEPS), str(digest_every), *filter(None, [folder])]
    shape = (f"--num-instances={instances}", f"--num-replicas={replicas}")
    return start(*shape, *options, *words, environ=environ).finish(LIMIT_S)


@functools.cache
def alone(replicas: int, **options) -> dict:
    """Return the results of this process; any other process has the same bits."""
    found = train_here(strategies.IPUStrategy(replicas), Training(STEPS, **options))
    return json.loads(json.dumps(found))


def found_by(finished: Finished) -> list[dict]:
    """Return the results of the remaining instances."""
    assert finished.status == 0, finished.stderr
    lines = [line.partition("<stdout>:")[2] for line in finished.stdout.splitlines() if "<stdout>:{" in line]
    return [json.loads(line) for line in lines]


def warnings(finished: Finished) -> list[str]:
    """Return poprun's warnings, without the one that depends on the number of cores of this machine."""
    found = [line.partition(" POPRUN [W] ")[2] for line in finished.stderr.splitlines() if " POPRUN [W] " in line]
    return [text for text in found if " cores of " not in text.partition(":")[0]]


def check(finished: Finished, expected: dict, shares: list[int]) -> None:
    """Check that all remaining instances have the bits of one process, the means of every step, and the replicas'
    shares.
    """
    found = found_by(finished)
    assert sorted((each["replicas"] for each in found), reverse=True) == shares
    for each in found:
        assert {name: each[name] for name in ("fingerprint", "step", "losses")} == {
            name: expected[name] for name in ("fingerprint", "step", "losses")
        }
        assert each["instances"] == len(shares)


PHASES = ("data", "forward", "all_reduce", "update", "checkpoint")
SIGNS = {
    "kill": "was killed by SIGKILL",
    "exit": "ended with exit status 3",
    "raise": "ended with exit status 1",
    "stop": "has made no progress for ",
    "cut": "was lost: its supervisor process was killed or cut off",
}
"""poprun's words about an instance that suffers the fault."""

EACH = [
    ("kill", "broadcast", 0),
    ("exit", "update", 1),
    ("raise", "all_reduce", 0),
    ("stop", "forward", 1),
    ("cut", "checkpoint", 0),
]
"""Faults of one of two instances, in its third step if it has one."""

THREE_OF_FOUR = [("cut", "data", 3), ("stop", "all_reduce", 0), ("exit", "update", 1)]
"""Successive faults: of one of four instances, one of the remaining three, and one of the last two."""


def test_cases_cover_every_kind_and_every_phase():
    cases = [*EACH, *THREE_OF_FOUR]
    assert {kind for kind, _, _ in cases} == set(SIGNS)
    assert {phase for _, phase, _ in cases} == {"broadcast", *PHASES}


@pytest.mark.complete
@pytest.mark.parametrize(("kind", "phase", "lost"), EACH)
def test_the_remaining_instance_goes_on_to_the_same_bits(kind: str, phase: str, lost: int, tmp_path: Path) -> None:
    """The instance compiles nothing more, and saves resumable checkpoints when the first is lost during one."""
    fault = f"{kind}:instance={lost},phase={phase}" + (",step=3" if phase != "broadcast" else "")
    options = [f"--stuck-timeout-s={STUCK_S}"] if kind == "stop" else []
    saved = str(tmp_path / "saved") if phase == "checkpoint" else ""
    finished = train(2, 4, "--on-failure=shrink", *options, "--inject", fault, folder=saved)
    check(finished, alone(4), [4])
    begin, end = warnings(finished)
    assert begin.startswith(f"instance {lost} on host ")
    assert SIGNS[kind] in begin
    assert begin.endswith(" on without it")
    assert end == f"the job completed without 1 instance: {begin.rpartition('; ')[0]}"
    assert finished.own_lines == []
    [found] = found_by(finished)
    first, *others = found["compiled"]
    assert first > 0
    assert others == [0] * 7
    assert found["threads"] == ["MainThread"]
    if saved:
        resumed = train_here(strategies.IPUStrategy(4), Training(STEPS, folder=saved))
        assert (resumed["step"], resumed["losses"]) == (8, [])
        assert resumed["fingerprint"] == found["fingerprint"]


@pytest.mark.parametrize("case", [THREE_OF_FOUR], ids=lambda case: "-".join(kind for kind, *_ in case))
def test_the_last_instance_goes_on_without_three_others(case: list[tuple[str, str, int]]) -> None:
    """Each instance is lost in a different step."""
    faults = []
    for number, (kind, phase, lost) in enumerate(case):
        faults += ["--inject", f"{kind}:instance={lost},phase={phase},step={2 * number + 1}"]
    finished = train(4, 8, "--on-failure=shrink", f"--stuck-timeout-s={STUCK_S}", *faults)
    check(finished, alone(8), [8])
    *losses, end = warnings(finished)
    assert len(losses) == 3, losses
    for (kind, _, lost), line in zip(case, losses, strict=True):
        assert line.startswith(f"instance {lost} on host "), losses
        assert SIGNS[kind] in line
    assert end.startswith("the job completed without 3 instances: instance ")


@pytest.mark.complete
def test_delays_and_a_flipped_bit_do_not_count_as_losses(tmp_path):
    faults = [f"--inject=delay:instance=0,phase={phase},step=2,seconds=0.1" for phase in PHASES]
    faults.append("--inject=flip-bit:instance=1,step=4")
    finished = train(3, 6, "--on-failure=shrink", *faults, digest_every=2, folder=str(tmp_path))
    check(finished, alone(6), [2, 2, 2])
    assert warnings(finished) == []
    assert "before step 4 instance 1 had other bits than the others, and got theirs" in finished.stderr


@pytest.mark.complete
def test_an_instance_that_completed_a_step_brings_the_others_up_to_it():
    """Instance 2 receives late what instance 0 sent, and completes the step that instance 0 has given up."""
    wide = {"WIDTH": "256"}  # a message of this size waits for its receiver
    faults = ("delay:instance=1,phase=all_reduce", "delay:instance=2,phase=waiting,seconds=3")
    faults += ("kill:instance=1,phase=waiting",)
    injected = [f"--inject={fault},step=3" for fault in faults]
    finished = train(3, 6, "--on-failure=shrink", *injected, environ=MESSAGES | wide)
    check(finished, alone(6, width=256), [3, 3])
    assert {each["mechanism"] for each in found_by(finished)} == {"ring"}


@pytest.mark.complete
def test_a_fault_of_the_program_itself_ends_the_job():
    faults = [f"--inject=raise:instance={instance},step=3" for instance in range(2)]
    finished = train(2, 4, "--on-failure=shrink", *faults)
    assert finished.status == 1
    assert "InjectedError" in finished.stderr


@pytest.mark.complete
@pytest.mark.parametrize("has_parts", [False, True])
def test_a_checkpoint_of_the_next_instance_resumes_a_ring_job_that_lost_the_first(tmp_path, has_parts):
    """The bits are those of an undisturbed training. Copies of the first instance's parts of the state survive."""
    options = ("--on-failure=shrink", "--inject=kill:instance=0,step=3,phase=all_reduce")
    environ = MESSAGES | {"UNTIL": "6"} | ({"PARTS": "1"} if has_parts else {})
    finished = train(3, 6, *options, folder=str(tmp_path), environ=environ)
    assert [(each["step"], each["replicas"], each["mechanism"]) for each in found_by(finished)] == [(6, 3, "ring")] * 2
    resumed = train_here(strategies.IPUStrategy(6), Training(STEPS, folder=str(tmp_path), has_parts=has_parts))
    assert len(resumed["losses"]) == 2
    assert resumed["fingerprint"] == alone(6, has_parts=has_parts)["fingerprint"]


def test_a_spare_takes_the_place_of_the_chief(tmp_path):
    """The spare has compiled everything before. Summary and timeline have the replicas that each one drove."""
    summary, trace = tmp_path / "summary.json", tmp_path / "trace.json"
    finished = train("2:3", 4, "--inject=kill:instance=0,step=3", f"--summary=json:{summary}", f"--timeline={trace}")
    check(finished, alone(4), [2, 2])
    for each in found_by(finished):
        assert each["compiled"][1:] == [0] * 7
    assert period_rows(to_be_judged(read_recordings(folder_beside(str(trace))))) == [
        ["steps", "instance 0", "instance 1", "spare 2"],
        ["0-2", "0-1", "2-3", "-"],
        ["3-7", "-", "0-1", "2-3"],  # instance 1 is the chief since then
    ]
    begin, end, cut_off = warnings(finished)
    assert cut_off.startswith("timeline: instance 0 (")
    assert begin.startswith("instance 0 on host ")
    assert "; spare 2 on host " in begin
    assert begin.endswith(" takes its place")
    assert end.startswith("the job completed with 1 spare in the place of lost instances: instance 0 on host ")
    described = json.loads(summary.read_text())
    assert [each["followed_by"] for each in described["faults_survived"]] == ["replace"]
    [attempt] = described["attempts"]
    assert [each["instances"] for each in attempt["carriers"]] == [[0, 1], [1, 2]]
    assert [each["is_spare"] for each in attempt["instances"]] == [False, False, False]


@pytest.mark.complete
def test_the_last_instance_with_variables_is_lost_while_it_hands_them_over():
    faults = ["kill:instance=1,step=3", "kill:instance=0,step=3,phase=broadcast"]
    finished = train("2:3", 6, *(f"--inject={fault}" for fault in faults))
    assert finished.status == 137
    assert "no instance is left that has the variables, and spares have none: the job ends" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.complete
def test_spares_that_are_lost_or_too_few_do_not_end_the_job():
    """Two of three instances are lost in one step, and one of two spares before it or while it joins."""
    faults = ["kill:instance=3,step=1", "kill:instance=0,step=3", "kill:instance=1,step=3,phase=all_reduce"]
    finished = train("3:5", 6, *(f"--inject={fault}" for fault in faults))
    check(finished, alone(6), [3, 3])
    *losses, end = warnings(finished)
    assert sorted(line.split()[1] for line in losses) == ["0", "1", "3"]
    assert end.startswith("the job completed with ")
    assert ", without 1 " in end
