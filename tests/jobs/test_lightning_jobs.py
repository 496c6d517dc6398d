"""Real jobs of Lightning's Trainer with the strategy "popdist"."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import pytest
from poprun_jobs import ROOT, start

PROGRAM = (sys.executable, str(ROOT / "tests" / "jobs" / "programs" / "train_lightning.py"))

pytestmark = [
    pytest.mark.job,
    pytest.mark.long,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("pytorch_lightning") is None, reason="PyTorch Lightning is not installed"
    ),
]


def train(instances, folder, *options):
    """Return the numbers of a training of four replicas, in an empty folder or one with checkpoints."""
    finished = start(f"--num-instances={instances}", "--num-replicas=4", *PROGRAM, str(folder), *options).finish(300)
    assert finished.status == 0, finished.stderr
    assert "poprun:" not in finished.stderr  # no warning about a library that ignores the other instances
    return json.loads(finished.lines_of(0)[-1])


def test_module_checkpoint_and_log_have_the_same_bits_for_every_number_of_instances(tmp_path):
    folder = tmp_path / "run"  # checkpoints name their folder
    found = []
    for instances in (1, 2, 4):
        found.append(train(instances, folder))
        shutil.rmtree(folder)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 12


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_precisions_give_the_same_bits_for_every_number_of_instances(tmp_path, precision):
    found = [train(each, tmp_path / str(each), f"--precision={precision}", "--epochs=1") for each in (1, 2, 4)]
    assert found[0][:3] == found[1][:3] == found[2][:3]


def test_a_training_resumes_on_other_instances_with_the_bits_of_an_uninterrupted_one(tmp_path):
    """The last checkpoint is from the middle of the second epoch. Workers of loaders change nothing."""
    train(2, tmp_path / "interrupted", "--steps=6", "--workers=2")
    resumed = train(1, tmp_path / "interrupted", "--resume", "--workers=2")
    assert resumed[:3] == train(4, tmp_path / "whole")[:3]


def test_a_missing_checkpoint_ends_the_job_with_its_name(tmp_path):
    finished = start("--num-instances=2", "--num-replicas=4", *PROGRAM, str(tmp_path), "--resume").finish()
    assert finished.status == 1
    assert "checkpoints/last.ckpt" in finished.stderr
    assert "FileNotFoundError" in finished.stderr
