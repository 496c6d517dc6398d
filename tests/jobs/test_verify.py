"""`poprun verify` with real programs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from poprun_jobs import ROOT, Finished, start

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.cores(2), pytest.mark.timeout(400)]

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = str(PROGRAMS / "verified_training.py")
DIGITS = str(ROOT / "popdist" / "examples" / "digits.py")
LIMIT_S = 350.0


def verify(*words: str, environ: dict[str, str] | None = None) -> Finished:
    return start("verify", *words, environ=environ).finish(LIMIT_S)


def verify_small(how: str, *words: str, **options) -> Finished:
    return verify("--num-replicas=2", *words, sys.executable, PROGRAM, how, **options)


def rows_of(finished: Finished) -> list[str]:
    """Return the column `result` of the table."""
    table = finished.stdout.partition("\n\n")[0].splitlines()
    return [row[table[0].index("result") :] for row in table[1:]]


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """Return the result of verifying a deterministic program, and its certificate."""
    certificate = tmp_path_factory.mktemp("verified") / "certificate.json"
    return verify_small("well", f"--certificate={certificate}"), certificate


def test_a_deterministic_program_verifies_and_gets_a_certificate(verified, subtests):
    finished, certificate = verified
    assert finished.status == 0, finished.stderr
    with subtests.test("all spreads are equal, and the fingerprint is the program's own"):
        assert rows_of(finished) == ["first", "equal"]
        said = re.findall(r"^\[1,0\]<stdout>:variables (.*)$", finished.stderr, re.MULTILINE)
        assert len(said) == 2
        equal = "equal: 2 runs of 4 steps with the same bits in all batches, gradients and variables"
        assert f"{equal}\nvariables {said[0]}\n" in finished.stdout
        assert said[0] == said[1]
    with subtests.test("each run is told when it completes, with what is left"):
        assert "poprun verify: run 1 of 2, 1 x 2\n" in finished.stderr
        assert re.search(
            r"^poprun verify: run 1 took [\d.]+ s: first; 1 run left, about [\d.]+ s$", finished.stderr, re.M
        )
        assert re.search(r"^poprun verify: run 2 took [\d.]+ s: equal; that was the last one$", finished.stderr, re.M)
    with subtests.test("the certificate says what decides bits"):
        content = json.loads(certificate.read_text())
        assert {"jax", "numpy", "CPU", "PJRT_NPROC", "program's SHA-256"} <= content["facts"][0].keys()
        assert [step["fingerprint"] for step in content["record"]][-1:] == said[:1]


@pytest.mark.complete
def test_an_edited_certificate_is_not_confirmed(verified, tmp_path):
    content = json.loads(verified[1].read_text())
    content["record"][1]["variables"][0] = "00000000"
    content["facts"][0]["jax"] = "0.1"
    certificate = tmp_path / "edited.json"
    certificate.write_text(json.dumps(content))
    finished = verify(f"--against={certificate}", "--spreads=1")
    assert finished.status == 1
    assert "was changed after it was written" in finished.own_text
    assert re.search(r"^  jax +0\.1 ", finished.stdout, re.MULTILINE)
    assert "the certificate and 1 x 2 differ first at step 1 (counted from 0), in the update" in finished.stdout


@pytest.mark.complete
def test_a_loss_that_depends_on_the_instance_is_named():
    finished = verify_small("instance", "--steps=1")
    assert finished.status == 1, finished.stderr
    assert rows_of(finished) == ["first", "differs from step 0 on: gradients"]
    assert re.search(r"^  \['w'\]  \d of 8 +[\d,]+ units? in the last place$", finished.stdout, re.MULTILINE)
    lines = Path(PROGRAM).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "strategy.instance_index" in text)
    assert f"strategy.instance_index at {os.path.relpath(PROGRAM)}:{line}, in the loss function" in finished.stdout


@pytest.mark.complete
def test_a_difference_between_equal_runs_is_named():
    finished = verify_small("set", "--spreads=1", "--steps=1")
    assert finished.status == 1, finished.stderr
    assert rows_of(finished) == ["first", "differs from step 0 on: batch"]
    assert "Look at a missing seed, the time, or the order of a set: the same spread gives different" in finished.stdout


@pytest.mark.complete
def test_a_dependence_on_the_number_of_instances_is_named():
    """A failing run is named, too."""
    finished = verify_small("count")
    assert finished.status == 1, finished.stderr
    first, second = rows_of(finished)
    assert (first, second.endswith("failed with exit status 7")) == ("first", True)
    assert "make different numbers of steps: one makes step 2 (counted from 0), the other does not" in finished.stdout
    assert f"strategy.num_instances at {os.path.relpath(PROGRAM)}:" in finished.stdout


@pytest.mark.complete
def test_differing_instances_of_one_run_are_named():
    finished = verify_small("time", "--spreads=2", "--steps=1")
    assert finished.status == 1, finished.stderr
    assert rows_of(finished)[0] == "instances differ from step 0 on: update"
    assert "instances 0 and 1 of run 1 differ first at step 0" in finished.stdout


@pytest.mark.complete
def test_a_run_with_losses_has_the_bits_of_one_process():
    finished = verify("--num-replicas=4", "--with-losses", sys.executable, PROGRAM, "well")
    assert finished.status == 0, finished.stdout + finished.stderr
    assert rows_of(finished) == ["first", "equal"]
    assert "instance 0 was lost in step 1\ninstance 3 was lost in step 2\nspare 4 joined in step 1\n" in finished.stdout
    assert re.search(r"^  2 to 3 +- .* -  ", finished.stdout, re.MULTILINE), finished.stdout


@pytest.mark.complete
def test_shards_survive_losses_without_spares_which_cannot_join(subtests):
    with subtests.test("without spares"):
        finished = verify("--num-replicas=4", "--with-losses", "--spares=0", sys.executable, PROGRAM, "parts")
        assert finished.status == 0, finished.stdout + finished.stderr
        assert rows_of(finished) == ["first", "equal"]
        assert "instance 0 was lost in step 1\ninstance 3 was lost in step 2\nreplicas" in finished.stdout
    with subtests.test("with a spare"):
        finished = verify_small("parts", "--with-losses")
        assert finished.status == 1
        assert "no spare can take the place of a lost instance: every instance has a part" in finished.own_text
        assert "run 2 of" not in finished.stderr


class TestRefusals:
    def test_a_program_that_cannot_survive_a_loss_is_named_before_the_loss(self):
        finished = verify_small("own", "--with-losses")
        assert finished.status == 1
        assert "cannot go on without a lost instance: the batches do not come from" in finished.own_text
        assert "run 2 of" not in finished.stderr

    def test_a_program_without_steps_is_named(self):
        finished = verify("--num-replicas=2", sys.executable, "-c", "import popdist; popdist.init()")
        assert finished.status == 1
        assert "has recorded no step; only programs that train by strategies.Trainer" in finished.own_text
        assert finished.stdout == ""

    @pytest.mark.complete
    def test_resume_needs_a_program_with_checkpoints(self):
        finished = verify_small("well", "--spreads=1", "--resume")
        assert finished.status == 1
        assert "--resume needs a program that saves checkpoints" in finished.own_text

    @pytest.mark.parametrize(
        "words",
        [("--spreads=3",), ("--transports=tcp",), ("--against=/no/such/file",), ("--certificate=/no/such/file",)],
    )
    def test_bad_options_are_refused_before_the_start(self, words, tmp_path):
        started = tmp_path / "started"
        finished = verify("--num-replicas=2", *words, "touch", str(started))
        assert finished.status == 2
        assert len(finished.own_lines) == 1
        assert not started.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.complete)])
def test_a_signal_ends_everything(number, tmp_path):
    program = "import signal; print('has begun', flush=True); signal.pause()"
    words = ("--num-replicas=2", "--spreads=2", sys.executable, "-c", program)
    job = start("verify", *words, environ={"TMPDIR": str(tmp_path)})
    assert job.streams[1].wait_for(b"has begun", LIMIT_S), job.streams[1].text
    assert [path.name for path in tmp_path.glob("poprun-verify-*")]
    job.process.send_signal(number)
    finished = job.finish()
    assert finished.status == 128 + number
    assert not list(tmp_path.glob("poprun-verify-*"))
    assert finished.stdout == ""


@pytest.mark.complete
def test_the_digits_program_verifies_over_a_ring_with_a_fault_and_a_resumption(tmp_path):
    """Other tests verify over shared memory."""
    pytest.importorskip("orbax.checkpoint")
    options = ["--spreads=1,2", "--transports=ring", "--inject", "--resume"]
    program = [DIGITS, "--model=mlp", "--max-steps=5", f"--checkpoint-dir={tmp_path / 'mine'}"]
    finished = verify("--num-replicas=4", *options, sys.executable, *program)
    assert finished.status == 0, finished.stdout + finished.stderr
    assert rows_of(finished) == ["first", *["equal"] * 3]
    assert not (tmp_path / "mine").exists()


@pytest.mark.complete
def test_workers_verify_over_grpc():
    program = [DIGITS, "--model=mlp", "--max-steps=2", "--strategy=multi-worker", "--replicas=4"]
    finished = verify("--num-replicas=4", "--transports=grpc", "--spreads=1,2", sys.executable, *program)
    assert finished.status == 0, finished.stdout + finished.stderr
    assert rows_of(finished) == ["first", "equal"]
