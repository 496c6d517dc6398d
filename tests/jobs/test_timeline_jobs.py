"""Timelines of jobs with a slow or lost instance."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from poprun_jobs import start
from strict_trace import read_strictly

from popdist.timeline.asked import folder_beside
from popdist.timeline.gauges import CORE_WAIT
from poprun.trace.merging import put_together, to_be_judged
from poprun.trace.recordings import read_recordings
from poprun.trace.report.findings import Cause
from poprun.trace.report.verdict import TimelineReport, judge
from poprun.trace.spans import Sort

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(150)]

PROGRAM = """\
import popdist
popdist.init()
communicator = popdist.context.communicator()
instruments = communicator.instruments
for step in range(30):
    instruments.step_begins(step)
    with instruments.during["forward and backward"]:
        pass
    with instruments.during["exchange"]:
        communicator.barrier(name="gradients")
    instruments.step_ends(1, 0.5)
"""
LOST = 22
SLOW = range(2, LOST)
"""Steps that take instance 1 50 ms longer."""
IN_TURN = """\
    if communicator.rank == 0:
        os.write(turns, b".")
    else:
        os.read(turns, 1)
"""
"""Lets instance 1 come to the barrier of a step after instance 0, on a busy machine too."""
UNTIL_RECORDED = f"""\
    if step == {LOST} - 1 and communicator.rank == 1:
        import pathlib, sys, numpy as np
        from poprun.trace.merging import put_together
        from poprun.trace.recordings import read_recordings
        from poprun.trace.spans import Sort
        while not all(
            set(range({LOST})) <= set(np.unique(spans.of(Sort.STEP)["step"]).tolist())
            for spans in put_together(read_recordings(pathlib.Path(sys.argv[1]))).spans
        ):
            pass
"""
"""Lets instance 1 wait before its loss until the steps of both instances can be read."""


TRAINING = """\
import sys, time
import jax.numpy as jnp, numpy as np, optax
import popdist, strategies
popdist.init()
strategy = strategies.PopDistStrategy()
is_slow = strategy.instance_index == int(sys.argv[1])

class Rows:
    def __len__(self): return 30 * strategy.num_replicas_in_sync
    def __getitem__(self, index):
        time.sleep(0.05 if is_slow else 0)
        return {"x": np.sin(np.arange(8, dtype=np.float32) + index)}

trainer = strategies.Trainer(strategy, lambda own, batch, key: (jnp.mean((batch["x"] @ own) ** 2), {}), optax.sgd(0.1))
state = trainer.init(np.ones((8, 3), np.float32))
for batch in strategy.distribute_dataset(Rows(), batch_size=1, seed=0).epoch(0):
    state, _ = trainer.step(state, batch)
"""


def verdict_of(tmp_path: Path, *words: str) -> TimelineReport:
    trace = tmp_path / "trace.json"
    finished = start(f"--timeline={trace}", *words).finish()
    assert finished.status == 0, finished.stderr
    return judge(to_be_judged(read_recordings(folder_beside(str(trace)))))


@pytest.mark.complete
class TestSeveralInstances:
    """Verdicts with different numbers of instances."""

    @pytest.mark.parametrize("instances", [2])
    def test_an_instance_with_slow_data_is_named_in_a_training(self, tmp_path: Path, instances: int) -> None:
        words = [f"-n={instances}", sys.executable, "-c", TRAINING, str(instances - 1)]
        culprit = verdict_of(tmp_path, *words).culprit
        assert culprit is not None
        assert (culprit.instance, culprit.cause) == (instances - 1, Cause.INPUT)

    @pytest.mark.parametrize("instances", [2, 3])
    def test_no_instance_is_named_when_all_are_alike(self, tmp_path: Path, instances: int) -> None:
        faults = [
            f"--inject=delay:instance={instance},step={step},seconds=0.05"
            for step in range(2, 30)
            for instance in range(instances)
        ]
        verdict = verdict_of(tmp_path, f"-n={instances}", *faults, sys.executable, "-c", PROGRAM)
        assert (verdict.culprit, verdict.link, verdict.input_bound) == (None, None, 0)


def test_a_slow_instance_is_named_and_recorded_until_its_loss(tmp_path: Path) -> None:
    trace = tmp_path / "a folder, with spaces" / "trace.json.gz"
    faults = [f"--inject=delay:instance=1,step={step},seconds=0.05" for step in SLOW]
    faults.append(f"--inject=kill:instance=1,step={LOST}")
    parts = trace.with_name("trace.json.gz.parts")
    os.mkfifo(turns := tmp_path / "turns")
    before, exchange, after = PROGRAM.partition('    with instruments.during["exchange"]:\n')
    begin = f"import os\nturns = os.open({str(turns)!r}, os.O_RDWR)\n"
    program = [sys.executable, "-c", begin + before + IN_TURN + exchange + after + UNTIL_RECORDED, str(parts)]
    finished = start("-n=2", f"--timeline={trace}", *faults, *program, environ={"POPRUN_LOG_LEVEL": "INFO"}).finish()
    assert finished.status == 128 + 9, finished.stderr
    assert "instance 1 (" in finished.stderr
    assert "did not come to its end" in finished.stderr
    assert f"poprun timeline report {shlex.quote(str(trace))}" in finished.stderr
    names = [event["name"] for event in read_strictly(trace) if event["ph"] == "X"]
    assert names.count("barrier 'gradients': exchange") >= 2 * LOST
    job = put_together(read_recordings(parts))
    for spans in job.spans:
        assert set(range(LOST)) <= set(np.unique(spans.of(Sort.STEP)["step"]).tolist())
        spans.measured.pop(CORE_WAIT, None)  # on a busy machine the verdict may be the load of the host
    culprit = judge(job).culprit
    assert culprit is not None
    assert (culprit.instance, culprit.cause) == (1, Cause.REST)
