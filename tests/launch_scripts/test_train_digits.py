"""Options, results and error messages of the main job."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
from horovod_installed import needs_horovod
from jobs import poprun_jobs

import strategies
from popdist.examples import digits as train_digits

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "popdist" / "examples" / "digits.py"

pytestmark = pytest.mark.long


def start(*arguments):
    return poprun_jobs.run_alone(sys.executable, str(PROGRAM), *map(str, arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "horse"], "invalid choice: 'horse' (choose from"),
        (["--model", "rnn"], "invalid choice: 'rnn' (choose from"),
        (["--batch-size", "1.5"], "argument --batch-size: invalid int value: '1.5'"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_bad_options_end_with_status_2(arguments, words, capsys):
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
            ["--strategy", "local", "--replicas", "4", "--batch-size", "360"],
            "one global batch takes 1440 elements (batch_size 360 on each of 4 replicas), but the data set has 1438",
        ),
    ],
)
def test_unusable_data_ends_with_one_line_and_status_2(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    assert train_digits.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"digits.py: error: {words}")
    assert printed.err.count("\n") == 1


RESULT = {
    "strategy": "popdist",
    "model": "mlp",
    "instances": 2,
    "replicas": 6,
    "steps": 5,
    "final_loss": 0.12345,
    "final_accuracy": 0.5,
    "test_accuracy": 0.75,
    "variables_sha256": "0123",
}


@pytest.mark.parametrize(("loss", "text"), [(0.12345, ", loss 0.1235"), (None, "")])
def test_a_result_reads_as_a_sentence(loss, text, capsys):
    train_digits.report(RESULT | {"final_loss": loss}, None)
    assert capsys.readouterr().out == (
        f"mlp with 6 replicas in 2 instances (popdist): 5 steps{text}, test accuracy 75.0%\nvariables 0123\n"
    )


def test_a_result_goes_to_its_json_file_or_as_json_to_standard_output(tmp_path, capsys):
    train_digits.report(RESULT, "-")
    assert json.loads(capsys.readouterr().out) == RESULT
    train_digits.report(RESULT, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == RESULT


def test_epochs_begin_at_the_data_set_s_position_and_end_with_the_last_step():
    strategy = strategies.IPUStrategy(num_replicas=1)
    dataset = strategy.distribute_dataset(np.arange(6), batch_size=2, shuffle=False)
    dataset.restore(dataclasses.replace(dataset.position(), epoch=1, step=2))
    assert [int(batch[0]) for batch in train_digits.batches(dataset, 8)] == [4, 0, 2]
    assert dataset.position().epoch == 2


def test_each_image_of_the_test_set_is_tested_once():
    data, model = train_digits.load_digits("digits"), train_digits.MODELS["mlp"]
    strategy = strategies.IPUStrategy(num_replicas=3)
    trainer = strategies.Trainer(strategy, train_digits.loss_of(model), optax.sgd(0.1))
    state = trainer.init(model.init(1, data.image_shape))
    found = trainer.evaluate(state, train_digits.test_set(strategy, data), metrics_fn=train_digits.accuracy_of(model))
    by_hand = np.asarray(model.apply(state.variables, data.test_images)).argmax(-1) == data.test_labels
    assert found["accuracy"] == by_hand.sum() / len(data.test_labels)
    assert found.rows == len(data.test_labels)


OPTIONS = ("--strategy", "local", "--replicas", 3, "--max-steps", 31, "--seed", 7)


@pytest.mark.complete
@pytest.mark.job
def test_the_result_is_written_as_json():
    done = start(*OPTIONS, "--json", "-")
    result = json.loads(done.stdout)
    exact = {"strategy": "local", "model": "cnn", "instances": 1, "replicas": 3, "steps": 31}
    assert exact.items() <= result.items()
    assert 0.1 < result["test_accuracy"] <= 1
    assert result["final_loss"] < 2.3
    assert len(result["variables_sha256"]) == 64
    assert "epoch 1: loss" in done.stderr


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_default_settings_reach_95_percent(model):
    done = start("--strategy", "local", "--replicas", 4, "--model", model, "--json", "-")
    assert json.loads(done.stdout)["test_accuracy"] >= 0.95


@pytest.mark.job
@pytest.mark.complete
def test_popdist_without_a_launcher_is_one_instance():
    done = start("--replicas", 2, "--max-steps", 1, "--json", "-")
    result = json.loads(done.stdout)
    assert (result["strategy"], result["instances"], result["replicas"]) == ("popdist", 1, 2)


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.timeout(400)
class TestCheckpoints:
    """Trainings in three pieces, on one and two instances, with the bits of one piece."""

    def train(self, folder, steps):
        options = ("--replicas", 4, "--max-steps", steps, "--checkpoint-dir", folder, "--checkpoint-every", 10)
        return start("--strategy", "local", "--model", "mlp", *options, "--json", "-")

    def train_here(self, folder, steps, monkeypatch, capsys, *more):
        """Run a finished training in this process; return the status and the output."""
        options = ("--replicas", "4", "--max-steps", str(steps), "--checkpoint-dir", str(folder), *more)
        words = ["--strategy", "local", "--model", "mlp", *options, "--json", "-"]
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), *words])
        return train_digits.main(), *capsys.readouterr()

    def test_a_training_resumes_at_its_last_checkpoint(self, tmp_path, monkeypatch, capsys):
        pytest.importorskip("orbax.checkpoint")
        folder = tmp_path / "checkpoints"
        whole = start("--strategy", "local", "--model", "mlp", "--replicas", 4, "--max-steps", 31, "--json", "-")
        first = self.train(folder, 13)
        assert "resuming" not in first.stderr
        assert sorted(path.name for path in folder.iterdir()) == ["step_00000010", "step_00000013"]

        words = ("--model", "mlp", "--max-steps", "31", "--checkpoint-dir", folder, "--json", "-")
        places = ("--num-instances=2", "--num-replicas=4")
        second = poprun_jobs.start(*places, sys.executable, str(PROGRAM), *map(str, words)).finish(100.0)
        assert second.status == 0, second.stderr
        assert f"resuming at step 13 of 31 from {folder}" in second.stderr
        result, wanted = json.loads(second.lines_of(0)[0]), json.loads(whole.stdout)
        same = ("steps", "final_loss", "test_accuracy", "variables_sha256")
        assert {name: result[name] for name in same} == {name: wanted[name] for name in same}

        status, out, _ = self.train_here(folder, 31, monkeypatch, capsys)
        assert status == 0
        again = json.loads(out)
        assert (again["variables_sha256"], again["final_loss"]) == (wanted["variables_sha256"], None)

        status, _, err = self.train_here(folder, 40, monkeypatch, capsys, "--seed", "1")
        assert status == 2
        assert err.count("\n") == 1
        assert "was saved with the trainer's seed 0, but this training has 1" in err


@needs_horovod
@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.timeout(250)
class TestHorovod:
    """Trainings with `--strategy horovod`; sums of two replicas have only one order, so the bits equal those of ipu."""

    OPTIONS = ("--strategy", "horovod", "--model", "mlp", "--max-steps", "20", "--json", "-")
    PLACES = ("-H", "localhost:2")
    EXACT = ("replicas", "steps", "final_loss", "final_accuracy", "test_accuracy", "variables_sha256")
    LIMIT_S = 100.0

    @staticmethod
    @functools.cache
    def alone():
        """Return the result of one process with both replicas."""
        done = start("--strategy", "local", "--model", "mlp", "--replicas", 2, "--max-steps", 20, "--json", "-")
        return json.loads(done.stdout)

    def command(self, *more):
        return [sys.executable, str(PROGRAM), *self.OPTIONS, *more]

    def finish(self, job):
        """Return the result of instance 0; the others write nothing."""
        finished = job.finish(self.LIMIT_S)
        assert finished.status == 0, finished.stderr
        assert len(finished.stdout.splitlines()) == 1
        result = json.loads(finished.lines_of(0)[0])
        assert result["strategy"] == "horovod"
        return result

    def test_two_instances_have_the_bits_of_one_process(self):
        result = self.finish(poprun_jobs.start("--num-instances=2", "--num-replicas=2", *self.command()))
        assert result["instances"] == 2
        assert {fact: result[fact] for fact in self.EXACT} == {fact: self.alone()[fact] for fact in self.EXACT}

    def test_a_process_without_launcher_has_the_same_bits(self):
        done = start(*self.OPTIONS, "--replicas", 2)
        result = json.loads(done.stdout)
        assert (result["strategy"], result["instances"]) == ("horovod", 1)
        assert {fact: result[fact] for fact in self.EXACT} == {fact: self.alone()[fact] for fact in self.EXACT}

    def test_a_wrong_number_of_replicas_is_refused_in_one_line(self):
        job = poprun_jobs.start_mpirun(2, *self.command("--replicas", "3"), places=self.PLACES)
        finished = job.finish(self.LIMIT_S)
        assert (finished.status, finished.stdout) == (2, "")
        ours = {line.partition("<stderr>:")[2].strip() for line in finished.stderr.splitlines() if "[1," in line[:3]}
        assert ours == {
            "digits.py: error: num_replicas is 3, but the number of instances is 2 (OMPI_COMM_WORLD_SIZE=2); "
            "replicas must divide evenly: use 2 or 4"
        }
