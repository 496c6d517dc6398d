"""The main job: its options, what it writes, and how it refuses what cannot be used."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import train_digits
from horovod_installed import needs_horovod
from jobs import poprun_jobs

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "launch_scripts" / "train_digits.py"


def start(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=cwd,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "horse"], "invalid choice: 'horse' (choose from"),
        (["--model", "rnn"], "invalid choice: 'rnn' (choose from"),
        (["--epochs", "0"], "argument --epochs: '0' is not an integer of at least 1"),
        (["--batch-size", "-3"], "argument --batch-size: '-3' is not an integer of at least 1"),
        (["--batch-size", "1.5"], "argument --batch-size: '1.5' is not an integer"),
        (["--replicas", "many"], "argument --replicas: 'many' is not an integer"),
        (["--max-steps", "0"], "argument --max-steps: '0' is not"),
        (["--seed", "-1"], "argument --seed: '-1' is not an integer of at least 0"),
        (["--learning-rate", "0"], "argument --learning-rate: '0' is not a number above zero"),
        (["--learning-rate", "nan"], "'nan' is not a number above zero"),
        (["--learning-rate", "fast"], "'fast' is not a number above zero"),
        (["--json", "/no/such/place/x.json"], "argument --json: /no/such/place is no directory"),
        (["--checkpoint-every", "3"], "argument --checkpoint-every: where? Give --checkpoint-dir as well"),
        (["--checkpoint-dir", "x", "--checkpoint-every", "0"], "argument --checkpoint-every: '0' is not"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_options_that_cannot_be_used_end_with_status_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        train_digits.read_options(arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_defaults_depend_on_the_model():
    cnn, mlp = train_digits.read_options([]), train_digits.read_options(["--model", "mlp"])
    assert (cnn.strategy, cnn.model, cnn.data, cnn.replicas) == ("popdist", "cnn", "digits", None)
    assert cnn.epochs > mlp.epochs
    assert cnn.learning_rate > mlp.learning_rate
    assert train_digits.read_options(["--epochs", "3", "--learning-rate", "0.5"]).epochs == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere.npz"], "nowhere.npz: no such file or directory"),
        (
            ["--strategy", "ipu", "--replicas", "4", "--batch-size", "360"],
            "--batch-size 360 on each of 4 replicas takes 1440 images per step and there are 1438 to train "
            "on; use at most 359",
        ),
    ],
)
def test_what_cannot_be_used_ends_with_one_line_and_status_2(arguments, words):
    done = start(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"train_digits.py: error: {words}")
    assert done.stderr.count("\n") == 1


@pytest.mark.job
def test_the_result_is_written_as_json_and_a_run_repeats_itself(tmp_path):
    options = ("--strategy", "ipu", "--replicas", 3, "--max-steps", 31, "--seed", 7)
    first = start(*options, "--json", "-")
    second = start(*options, "--json", "out.json", cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    result, again = json.loads(first.stdout), json.loads((tmp_path / "out.json").read_text())
    assert "test accuracy" in second.stdout
    exact = {"strategy": "ipu", "model": "cnn", "instances": 1, "replicas": 3, "steps": 31, "epochs": 2}
    assert exact.items() <= result.items()
    assert 0.1 < result["test_accuracy"] <= 1
    assert result["final_loss"] < 2.3
    assert result["samples_per_second"] == pytest.approx(3 * 16 / result["seconds_per_step"])
    times = {"seconds_per_step", "samples_per_second"}
    assert {k: v for k, v in result.items() if k not in times} == {k: v for k, v in again.items() if k not in times}
    assert len(result["variables_sha256"]) == 64
    assert "epoch 1: loss" in first.stderr
    assert "step/s" not in first.stderr


@pytest.mark.job
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_default_settings_reach_95_percent(model):
    done = start("--strategy", "ipu", "--replicas", 4, "--model", model, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["test_accuracy"] >= 0.95


@pytest.mark.job
def test_popdist_without_a_launcher_is_one_instance():
    done = start("--replicas", 2, "--max-steps", 1, "--check-numerics", "--json", "-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["strategy"], result["instances"], result["replicas"]) == ("popdist", 1, 2)
    assert result["seconds_per_step"] is None


@pytest.mark.job
@pytest.mark.timeout(400)
class TestCheckpoints:
    """`--checkpoint-dir`: what was trained in three pieces, on one and two instances, has the bits of one piece."""

    def train(self, folder, steps, *more):
        options = ("--replicas", 4, "--max-steps", steps, "--checkpoint-dir", folder, "--checkpoint-every", 10, *more)
        return start("--strategy", "ipu", *options, "--json", "-")

    def test_a_training_goes_on_where_it_ended(self, tmp_path):
        pytest.importorskip("orbax.checkpoint")
        folder = tmp_path / "checkpoints"
        whole = start("--strategy", "ipu", "--replicas", 4, "--max-steps", 31, "--json", "-")
        first = self.train(folder, 13)
        assert "resuming" not in first.stderr
        assert sorted(path.name for path in folder.iterdir()) == ["step_00000010", "step_00000013"]

        words = ("--max-steps", "31", "--checkpoint-dir", folder, "--json", "-")
        places = ("--num-instances=2", "--num-replicas=4")
        second = poprun_jobs.start(*places, sys.executable, str(PROGRAM), *map(str, words)).finish(100.0)
        assert second.status == 0, second.stderr
        assert f"resuming at step 13 of 31 from {folder}" in second.stderr
        result, wanted = json.loads(second.lines_of(0)[0]), json.loads(whole.stdout)
        same = ("steps", "epochs", "final_loss", "test_accuracy", "variables_sha256")
        assert {name: result[name] for name in same} == {name: wanted[name] for name in same}

        third = self.train(folder, 31)
        again = json.loads(third.stdout)
        assert (again["variables_sha256"], again["final_loss"]) == (wanted["variables_sha256"], None)

        fourth = self.train(folder, 20)
        assert (fourth.returncode, fourth.stdout) == (2, "")
        assert "is at step 31 and 20 were asked for; ask for more" in fourth.stderr

        fifth = self.train(folder, 40, "--seed", 1)
        assert fifth.returncode == 2
        assert fifth.stderr.count("\n") == 1
        assert "was saved with the trainer's seed 0, and this training has 1" in fifth.stderr


@needs_horovod
@pytest.mark.job
@pytest.mark.timeout(250)
class TestHorovod:
    """`--strategy horovod`; with two replicas no order of the sums is left to choose, so the bits are those of ipu."""

    OPTIONS = ("--strategy", "horovod", "--max-steps", "20", "--json", "-")
    PLACES = ("-H", "localhost:2")
    EXACT = ("replicas", "steps", "final_loss", "final_accuracy", "test_accuracy", "variables_sha256")
    LIMIT_S = 100.0

    @staticmethod
    @functools.cache
    def alone():
        """What one process says that drives both replicas."""
        done = start("--strategy", "ipu", "--replicas", 2, "--max-steps", 20, "--json", "-")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def command(self, *more):
        return [sys.executable, str(PROGRAM), *self.OPTIONS, *more]

    def finish(self, job):
        """What instance 0 of a job says; the others say nothing."""
        finished = job.finish(self.LIMIT_S)
        assert finished.status == 0, finished.stderr
        assert len(finished.stdout.splitlines()) == 1
        result = json.loads(finished.lines_of(0)[0])
        assert result["strategy"] == "horovod"
        return result

    def test_under_mpirun(self):
        result = self.finish(poprun_jobs.start_mpirun(2, *self.command(), places=self.PLACES))
        assert result["instances"] == 2
        assert {fact: result[fact] for fact in self.EXACT} == {fact: self.alone()[fact] for fact in self.EXACT}

    def test_under_poprun(self):
        result = self.finish(poprun_jobs.start("--num-instances=2", "--num-replicas=4", *self.command()))
        assert (result["instances"], result["replicas"], result["steps"]) == (2, 4, 20)
        assert result["final_loss"] < 2.3

    def test_without_a_launcher(self):
        done = start(*self.OPTIONS, "--replicas", 2)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["strategy"], result["instances"]) == ("horovod", 1)
        assert {fact: result[fact] for fact in self.EXACT} == {fact: self.alone()[fact] for fact in self.EXACT}

    def test_a_wrong_number_of_replicas_is_one_clear_line(self):
        job = poprun_jobs.start_mpirun(2, *self.command("--replicas", "3"), places=self.PLACES)
        finished = job.finish(self.LIMIT_S)
        assert (finished.status, finished.stdout) == (2, "")
        ours = {line.partition("<stderr>:")[2].strip() for line in finished.stderr.splitlines() if "[1," in line[:3]}
        assert ours == {
            "train_digits.py: error: asked for 3 replicas on 2 instances (OMPI_COMM_WORLD_SIZE=2); "
            "replicas must divide evenly: use 2 or 4"
        }
