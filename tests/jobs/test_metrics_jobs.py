"""Metric files of jobs that lose the writing instance, that restart, or that cannot write them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from poprun_jobs import start

PROGRAM = Path(__file__).parent / "programs" / "surviving_training.py"
SAVED = PROGRAM.with_name("saved_training.py")
STEPS = 4  # of each of two epochs

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(150)]


@pytest.mark.complete
def test_metric_files_have_each_step_once_after_the_writing_instance_is_lost(tmp_path: Path) -> None:
    words = [f"--metrics=csv:{tmp_path}/run.csv,prometheus:0", f"--metrics=jsonl:{tmp_path}/run.jsonl"]
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    shape = ["--num-instances=2", "--num-replicas=4", "--on-failure=shrink", "--inject=kill:instance=0,step=5"]
    finished = start(*shape, *words, sys.executable, str(PROGRAM), str(STEPS)).finish(120)
    assert finished.status == 0, finished.stderr
    [line] = [line.partition("<stdout>:")[2] for line in finished.stdout.splitlines() if "<stdout>:{" in line]
    told = [
        {"step": step + 1, "loss": loss, "hidden": hidden}
        for step, (loss, hidden) in enumerate(json.loads(line)["losses"])
    ]
    assert len(told) == 2 * STEPS
    table = csv.DictReader((tmp_path / "run.csv").read_text().splitlines(), strict=True)
    rows = [{name: float(number) for name, number in row.items() if name != "time"} for row in table]
    assert rows == told
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in row if name != "time"} for row in lines] == told


@pytest.mark.complete
def test_metric_files_have_each_step_once_after_a_restart(tmp_path: Path) -> None:
    """Steps 4 and 5 are made a second time, from the checkpoint of step 3."""
    words = [f"--metrics=csv:{tmp_path}/run.csv", f"--metrics=jsonl:{tmp_path}/run.jsonl"]
    shape = ["--num-replicas=4", "--on-failure=restart", "--restart-backoff-s=0"]
    program = [sys.executable, str(SAVED), str(tmp_path / "checkpoints"), "8", "save"]
    finished = start(*shape, "--inject=kill:instance=0,step=5", *words, *program).finish(120)
    assert finished.status == 0, finished.stderr
    assert [line for line in finished.lines_of(0) if line.startswith("resumed")] == ["resumed at 0", "resumed at 3"]
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines(), strict=True))
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in lines] == [(int(row["step"]), float(row["loss"])) for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "run.csv", "run.jsonl"]


def test_a_job_with_unwritable_metrics_starts_nothing(tmp_path: Path) -> None:
    finished = start("-n=2", f"--metrics=csv:{tmp_path}", sys.executable, "-c", "print('started')").finish(60)
    assert finished.status == 2
    assert f"--metrics csv:{tmp_path}: it is a folder; write csv:FILE" in finished.stderr
    assert "started" not in finished.stdout


PROGRAMS = {
    "jax": [str(PROGRAM), str(STEPS)],
    "torch": [str(PROGRAM.with_name("train_module.py")), "popdist", "4"],
    "keras": [str(PROGRAM.with_name("keras_training.py"))],
}


@pytest.mark.complete
@pytest.mark.timeout(450)
@pytest.mark.parametrize("framework", PROGRAMS)
def test_norms_and_histograms_are_the_same_for_every_number_of_instances(framework: str, tmp_path: Path) -> None:
    """The programs know nothing of them: they are asked for on poprun's command line."""
    pytest.importorskip(framework)
    found = []
    for instances in (1, 2, 4):
        path = tmp_path / f"{instances}.csv"
        words = [f"--metrics=csv:{path}", "--norms-every=1", "--histograms-every=3"]
        program = [sys.executable, *PROGRAMS[framework]]
        finished = start(f"--num-instances={instances}", "--num-replicas=4", *words, *program).finish(140)
        assert finished.status == 0, finished.stderr
        table = csv.DictReader(path.read_text().splitlines(), strict=True)
        found.append([{name: number for name, number in row.items() if name != "time"} for row in table])
    assert found[1:] == found[:1] * 2
    rows = [row for row in found[0] if row["loss"]]
    assert all(float(row["gradient_norm"]) > 0 and float(row["weight_norm"]) > 0 for row in rows)
    seen = [any(number and name.endswith("/p50") for name, number in row.items()) for row in rows]
    assert seen == [(int(row["step"]) - 1) % 3 == 0 for row in rows]
