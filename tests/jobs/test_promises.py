"""Program, seed, data and number of replicas decide the bits, not how instances drive the replicas."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from poprun_jobs import ROOT, Finished, start

PROGRAMS = Path(__file__).parent / "programs"
MODELS = {8: ("cnn", "mlp"), 6: ("dropout",)}  # by the number of replicas
LIMIT_S = 200

pytestmark = [pytest.mark.job, pytest.mark.timeout(LIMIT_S + 20)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("promises")


def python(name: str, *words: object) -> list[str]:
    return [sys.executable, str(PROGRAMS / name), *map(str, words)]


def finish_alone(words: list[str]) -> None:
    """Run a program without a launcher to its end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_"))}
    subprocess.run(words, check=True, timeout=LIMIT_S, env=clean | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)


def finish(*words: str) -> Finished:
    """Run poprun to its end, which is a good one."""
    job = start(*words)
    job.process.wait(LIMIT_S)
    finished = job.finish()
    assert finished.status == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def train(directory):
    """What a job of n instances found; n = 0 is one process without a launcher, the reference."""

    @functools.cache
    def run_once(replicas: int, instances: int, how: str) -> dict[str, str]:
        output = directory / f"{instances}-of-{replicas}-{how}.json"
        program = python("digits_everywhere.py", output, how if instances else replicas, *MODELS[replicas])
        if instances == 0:
            finish_alone(program)
        else:
            finish(f"--num-replicas={replicas}", f"--num-instances={instances}", *program)
        return json.loads(output.read_text())

    return run_once


class TestTheVariablesAreTheSameForEveryNumberOfInstances:
    @pytest.mark.parametrize(("replicas", "instances"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 2), (6, 3)])
    def test_as_those_of_one_process(self, train, replicas, instances):
        found, alone = train(replicas, instances, "auto"), train(replicas, 0, "")
        assert {name: found[name] for name in MODELS[replicas]} == {name: alone[name] for name in MODELS[replicas]}

    @pytest.mark.parametrize(("replicas", "instances"), [(8, 4), (6, 3)])
    def test_over_the_ring_too(self, train, replicas, instances):
        found, alone = train(replicas, instances, "ring"), train(replicas, 0, "")
        assert found == alone | {"mechanism": "ring"}

    def test_also_where_the_shared_memory_is_too_small_for_the_window(self, train, directory):
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("only root may mount a small /dev/shm")
        mount = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
        in_small_memory = ["unshare", "-m", "sh", "-c", mount, "sh"]
        probe = subprocess.run([*in_small_memory, "true"], capture_output=True)
        if probe.returncode != 0:
            pytest.skip(f"no mount namespace: {probe.stderr.decode().strip()}")
        output = directory / "small.json"
        job = [sys.executable, "-m", "poprun", "--allow-run-as-root=yes", "--num-replicas=6", "--num-instances=2"]
        finish_alone([*in_small_memory, *job, *python("digits_everywhere.py", output, "auto", *MODELS[6])])
        assert json.loads(output.read_text()) == train(6, 0, "") | {"mechanism": "ring"}


def test_the_command_of_the_documentation_gives_the_bits_of_one_process(directory):
    """The main job with its defaults, once as two instances and once without a launcher."""
    program = [str(ROOT / "launch_scripts" / "train_digits.py"), "--max-steps=20", "--model=mlp"]
    together, alone = directory / "together.json", directory / "alone.json"
    finish("--num-replicas=4", "--num-instances=2", sys.executable, *program, f"--json={together}")
    finish_alone([sys.executable, *program, "--strategy=ipu", "--replicas=4", f"--json={alone}"])
    results = [json.loads(path.read_text()) for path in (together, alone)]
    assert [result["instances"] for result in results] == [2, 1]
    for fact in ("replicas", "steps", "final_loss", "test_accuracy", "variables_sha256"):
        assert results[0][fact] == results[1][fact]


class TestTheRowsOfPopDistStrategy:
    """P-01 to P-05, P-07, P-10 to P-16, P-19, P-21 and P-34, translated; two instances, two replicas."""

    def test_under_poprun(self):
        program = python("popdist_strategy_rows.py")
        finished = finish("--num-replicas=2", "--num-instances=2", *program)
        assert finished.stdout == "[1,0]<stdout>:all rows held\n"

    def test_under_mpirun(self):
        mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        found = subprocess.run(
            [mpirun, "-np", "2", "--oversubscribe", *python("popdist_strategy_rows.py")],
            env=os.environ | allowed | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert found.returncode == 0, found.stderr
        assert found.stdout == "all rows held\n"


class TestCollectivesBetweenReplicas:
    """Inside compiled functions; the same checks pass in one process and in several."""

    @pytest.mark.parametrize(("replicas", "instances"), [(4, 1), (4, 2), (6, 3)])
    def test_across_instances(self, replicas, instances):
        program = python("replica_collectives.py")
        finished = finish(f"--num-replicas={replicas}", f"--num-instances={instances}", *program)
        assert finished.stdout == "[1,0]<stdout>:all held\n"
