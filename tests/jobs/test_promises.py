"""Bits of trainings, which depend only on program, seed, data and number of replicas."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from poprun_jobs import ROOT, Finished, run_alone, start, start_mpirun

import strategies

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
from digits_everywhere import train_digits, train_model  # noqa: E402

strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too
MECHANISMS = {"auto": "window", "ring": "ring"}
LIMIT_S = 200

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.cores(2), pytest.mark.timeout(LIMIT_S + 20)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("promises")


def python(name: str, *words: object) -> list[str]:
    return [sys.executable, str(PROGRAMS / name), *map(str, words)]


def compiled_once() -> list[str]:
    """Return options that let one instance compile for all, in a cache that other jobs share."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return [f"--executable-cache-path={folder}"] if folder else []


def finish(*words: str) -> Finished:
    """Run poprun to its end, and check that its exit status is 0."""
    job = start(*words)
    job.process.wait(LIMIT_S)
    finished = job.finish()
    assert finished.status == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def train(directory):
    """Return a function that trains in a job, and returns the fingerprints."""

    def run(replicas: int, instances: int, how: str, *models: str) -> dict[str, str]:
        output = directory / f"{instances}-of-{replicas}-{how}-{'-'.join(models)}.json"
        program = python("digits_everywhere.py", output, how, *models)
        finish(f"--num-replicas={replicas}", f"--num-instances={instances}", *compiled_once(), *program)
        return json.loads(output.read_text())

    return run


@functools.cache
def alone(replicas: int, model: str) -> str:
    """Return the fingerprint of this process."""
    return train_model(strategies.IPUStrategy(replicas), model)


class TestVariables:
    @pytest.mark.parametrize(
        ("replicas", "instances", "how", "models"),
        [
            pytest.param(8, 2, "auto", ["mlp"], marks=pytest.mark.complete),
            (6, 3, "ring", ["dropout"]),
            pytest.param(8, 8, "auto", ["dropout"], marks=pytest.mark.complete),
        ],
    )
    def test_jobs_have_the_bits_of_one_process(self, train, replicas, instances, how, models):
        found = train(replicas, instances, how, *models)
        assert found == {model: alone(replicas, model) for model in models} | {"mechanism": MECHANISMS[how]}

    @pytest.mark.complete
    def test_jobs_with_too_little_shared_memory_for_the_window_have_the_bits_of_one_process(self, train, directory):
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("only root may mount a small /dev/shm")
        mount = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
        in_small_memory = ["unshare", "-m", "sh", "-c", mount, "sh"]
        probe = subprocess.run([*in_small_memory, "true"], capture_output=True)
        if probe.returncode != 0:
            pytest.skip(f"no mount namespace: {probe.stderr.decode().strip()}")
        output = directory / "small.json"
        job = [sys.executable, "-m", "poprun", "--allow-run-as-root=yes", "--num-replicas=6", "--num-instances=2"]
        run_alone(*in_small_memory, *job, *python("digits_everywhere.py", output, "auto", "dropout"), limit_s=LIMIT_S)
        assert json.loads(output.read_text()) == {"dropout": alone(6, "dropout"), "mechanism": "ring"}


@pytest.mark.complete
def test_the_documented_command_gives_the_bits_of_one_process(directory, monkeypatch):
    """The main job with its defaults, once as two instances and once without a launcher in this process."""
    program = [str(ROOT / "popdist" / "examples" / "digits.py"), "--max-steps=5"]
    together, alone = directory / "together.json", directory / "alone.json"
    finish("--num-replicas=4", "--num-instances=2", *compiled_once(), sys.executable, *program, f"--json={together}")
    monkeypatch.setattr(sys, "argv", [*program, "--strategy=ipu", "--replicas=4", f"--json={alone}"])
    assert train_digits.main() == 0
    results = [json.loads(path.read_text()) for path in (together, alone)]
    assert [result["instances"] for result in results] == [2, 1]
    for fact in ("replicas", "steps", "final_loss", "test_accuracy", "variables_sha256"):
        assert results[0][fact] == results[1][fact]


@pytest.mark.complete
def test_popdist_strategy_holds_its_promises_under_mpirun():
    """The checks are translated from the original's tests, for two instances with one replica each.

    All other jobs here are started by poprun.
    """
    finished = start_mpirun(2, *python("popdist_strategy_rows.py")).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert finished.lines_of(0) == ["all rows held"]
