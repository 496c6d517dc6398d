"""When an instance is lost the others carry its replicas, to the same bits.

Each kind of loss once, three of them in one job, and a ring with a checkpoint: what the operating system makes of it.
`tests/strategies/test_surviving.py` has every kind in every phase with every number of instances, on threads.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from poprun_jobs import ROOT, Finished, start
from tiers import first_of

import strategies

PROGRAM = Path(__file__).parent / "programs" / "surviving_training.py"
sys.path.insert(0, str(PROGRAM.parent))
from surviving_training import Training  # noqa: E402
from surviving_training import train as train_here  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
STEPS = 4  # of each of two epochs

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.cores(2), pytest.mark.timeout(300)]


LIMIT_S = 150.0
STUCK_S = 10
"""So long an instance may take for what it compiles in its first step, while the others wait for it."""


MESSAGES = {"POPDIST_MECHANISM": "ring"}
"""The environment of instances that share no memory, as those of several hosts."""


def train(
    instances: int,
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
    """What one process finds, this one: the bits are those of any other."""
    found = train_here(strategies.IPUStrategy(replicas), Training(STEPS, **options))
    return json.loads(json.dumps(found))


def found_by(finished: Finished) -> list[dict]:
    """What the instances that are left have found."""
    assert finished.status == 0, finished.stderr
    lines = [line.partition("<stdout>:")[2] for line in finished.stdout.splitlines() if "<stdout>:{" in line]
    return [json.loads(line) for line in lines]


def warnings(finished: Finished) -> list[str]:
    return [line.partition(" POPRUN [W] ")[2] for line in finished.stderr.splitlines() if " POPRUN [W] " in line]


def check(finished: Finished, expected: dict, shares: list[int]) -> None:
    """All who are left have the bits of one process, saw the means of every step, and share the replicas."""
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
"""What poprun says about an instance to which it happens."""

EACH = [
    ("kill", "forward", 0),
    ("exit", "update", 1),
    ("raise", "all_reduce", 0),
    ("stop", "all_reduce", 1),
    ("cut", "data", 0),
]
"""One of two."""

THREE_OF_FOUR = [
    [("cut", "data", 3), ("stop", "all_reduce", 0), ("exit", "update", 1)],
    [("kill", "data", 3), ("raise", "update", 0), ("exit", "checkpoint", 1)],
    [("stop", "checkpoint", 0), ("cut", "forward", 2), ("raise", "update", 1)],
]
"""One after another: from all four, from the three that are left, and from the last two."""


def test_every_kind_and_every_phase_is_met():
    cases = [*EACH, *itertools.chain.from_iterable(THREE_OF_FOUR)]
    assert {kind for kind, _, _ in cases} == set(SIGNS)
    assert {phase for _, phase, _ in cases} == set(PHASES)


def lose_one(kind: str, phase: str, lost: int) -> None:
    fault = f"{kind}:instance={lost},step=3,phase={phase}"
    stuck = (f"--stuck-timeout-s={STUCK_S}",) if kind == "stop" else ()
    finished = train(2, 8, "--on-failure=shrink", *stuck, "--inject", fault)
    check(finished, alone(8), [8])
    begin, end = warnings(finished)
    assert begin.startswith(f"instance {lost} on host ")
    assert SIGNS[kind] in begin
    assert begin.endswith(" on without it")
    assert end == f"the job completed without 1 instance: {begin.rpartition('; ')[0]}"
    assert finished.own_lines == []


@pytest.mark.complete
@pytest.mark.parametrize(("kind", "phase", "lost"), EACH)
def test_the_other_goes_on_to_the_same_bits(kind, phase, lost):
    lose_one(kind, phase, lost)


@pytest.mark.complete
def test_before_the_first_step():
    fault = "kill:instance=0,phase=broadcast"
    check(train(3, 6, "--on-failure=shrink", "--inject", fault), alone(6), [3, 3])


@pytest.mark.parametrize("case", first_of(THREE_OF_FOUR), ids=lambda case: "-".join(kind for kind, *_ in case))
def test_the_last_one_goes_on_without_three_others(case: list[tuple[str, str, int]], tmp_path: Path) -> None:
    """Each is lost in a step of its own; a checkpoint is begun by whoever is the first of those that are left."""
    faults = []
    for number, (kind, phase, lost) in enumerate(case):
        when = "" if phase == "checkpoint" else f",step={2 * number + 1}"
        faults += ["--inject", f"{kind}:instance={lost},phase={phase}{when}"]
    saved = str(tmp_path) if any(phase == "checkpoint" for _, phase, _ in case) else ""
    finished = train(4, 8, "--on-failure=shrink", f"--stuck-timeout-s={STUCK_S}", *faults, folder=saved)
    check(finished, alone(8), [8])
    *losses, end = warnings(finished)
    assert len(losses) == 3, losses
    for (kind, _, lost), line in zip(case, losses, strict=True):
        assert line.startswith(f"instance {lost} on host "), losses
        assert SIGNS[kind] in line
    assert end.startswith("the job completed without 3 instances: instance ")


@pytest.mark.complete
def test_a_delay_changes_nothing_but_the_time(tmp_path):
    faults = [f"--inject=delay:instance=0,phase={phase},step=2,seconds=0.1" for phase in PHASES]
    finished = train(3, 6, "--on-failure=shrink", *faults, folder=str(tmp_path))
    check(finished, alone(6), [2, 2, 2])
    assert warnings(finished) == []


@pytest.mark.complete
def test_one_that_has_completed_a_step_brings_the_others_up_to_it():
    """Instance 2 takes late what instance 0 has sent it, and completes the step, which instance 0 has given up."""
    wide = {"WIDTH": "256"}  # so much is sent only to one who takes it
    faults = ("delay:instance=1,phase=all_reduce", "delay:instance=2,phase=waiting,seconds=3")
    faults += ("kill:instance=1,phase=waiting",)
    injected = [f"--inject={fault},step=3" for fault in faults]
    finished = train(3, 6, "--on-failure=shrink", *injected, environ=MESSAGES | wide)
    check(finished, alone(6, width=256), [3, 3])
    assert {each["mechanism"] for each in found_by(finished)} == {"ring"}


THREE_KILLS = [f"--inject=kill:instance={instance},step={step}" for instance, step in [(3, 2), (0, 4), (1, 6)]]


@pytest.mark.complete
def test_no_loss_compiles_anything(tmp_path):
    """The last one of four keeps its two replicas at first, then it gets two more, then all eight."""
    finished = train(4, 8, "--on-failure=shrink", f"--executable-cache-path={tmp_path}", *THREE_KILLS)
    check(finished, alone(8), [8])
    [found] = found_by(finished)
    first, *others = found["compiled"]
    assert first > 0
    assert others == [0] * 7
    assert found["threads"] == ["MainThread"]


@pytest.mark.complete
def test_too_few_are_left():
    finished = train(3, 6, "--on-failure=shrink", "--min-instances=3", "--inject=kill:instance=1,step=3")
    assert finished.status == 137
    assert finished.own_lines[0].startswith("instance 1 on host ")
    assert finished.own_lines[-1] == "2 instances would be left, --min-instances is 3: the job ends"
    assert warnings(finished) == []


@pytest.mark.complete
def test_those_that_have_not_joined_cannot_go_on():
    words = ("--num-instances=2", "--num-replicas=2", "--on-failure=shrink")
    program = "import os, signal, sys; sys.exit(3) if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else signal.pause()"
    finished = start(*words, sys.executable, "-c", program).finish(LIMIT_S)
    assert finished.status == 3
    assert finished.own_lines[-1].startswith("the others cannot go on: what is lost before popdist.init has returned")


@pytest.mark.complete
def test_a_fault_of_the_program_itself_ends_the_job():
    faults = [f"--inject=raise:instance={instance},step=3" for instance in range(3)]
    finished = train(3, 6, "--on-failure=shrink", *faults)
    assert finished.status == 1
    assert "InjectedError" in finished.stderr


def test_between_hosts_what_the_next_instance_saved_when_the_first_was_lost_is_resumed(tmp_path):
    """With the bits of a training that was never disturbed."""
    options = ("--on-failure=shrink", "--inject=kill:instance=0,step=3,phase=all_reduce")
    finished = train(3, 6, *options, folder=str(tmp_path), environ=MESSAGES | {"UNTIL": "6"})
    assert [(each["step"], each["replicas"], each["mechanism"]) for each in found_by(finished)] == [(6, 3, "ring")] * 2
    resumed = train_here(strategies.IPUStrategy(6), Training(STEPS, folder=str(tmp_path)))
    assert len(resumed["losses"]) == 2
    assert resumed["fingerprint"] == alone(6)["fingerprint"]


@pytest.mark.complete
def test_the_next_instance_saves_when_the_first_is_lost_in_a_checkpoint(tmp_path):
    """Resumed from what it has saved, the main job has the bits of one that was never disturbed."""
    undisturbed = fingerprint_of(digits(1, 10, tmp_path / "undisturbed"))
    digits(3, 6, tmp_path / "saved", "--on-failure=shrink", "--inject=kill:instance=0,step=3,phase=checkpoint")
    resumed = digits(1, 10, tmp_path / "saved")
    assert "resuming at step 6 of 10" in resumed.stderr
    assert fingerprint_of(resumed) == undisturbed


def digits(instances: int, steps: int, folder: Path, *options: str) -> Finished:
    """The main job, saved every second step."""
    program = (sys.executable, str(ROOT / "launch_scripts" / "train_digits.py"), "--model", "cnn", "--batch-size", "8")
    saved = ("--max-steps", str(steps), "--checkpoint-dir", str(folder), "--checkpoint-every", "2")
    shape = (f"--num-instances={instances}", "--num-replicas=6")
    finished = start(*shape, *options, *program, *saved).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    return finished


def fingerprint_of(finished: Finished) -> str:
    """As it is shown by one instance, without a tag in a pipe, or by several."""
    [fingerprint] = re.findall(r"^(?:\[1,\d+\]<stdout>:)?variables (?:.* )?(\S+)$", finished.stdout, re.MULTILINE)
    return fingerprint


@pytest.mark.complete
def test_a_flipped_bit_is_healed_where_the_job_survives():
    finished = train(4, 8, "--on-failure=shrink", "--inject=flip-bit:instance=1,step=4", digest_every=2)
    check(finished, alone(8), [2, 2, 2, 2])
    assert "before step 4 instance 1 had other bits than the others, and got theirs" in finished.stderr
