"""Keras models in jobs: several instances have the bits of one, even when one of them is killed."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from poprun_jobs import start

import strategies

PROGRAM = Path(__file__).parent / "programs" / "keras_training.py"
LIMIT_S = 150.0
strategies.IPUStrategy(8)  # JAX's devices are fixed when it starts, for the tests of other files too

pytestmark = [
    pytest.mark.job,
    pytest.mark.cores(2),
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras and NumPy
]


def train(*options: str, words: tuple[str, ...] = ()) -> list[dict]:
    shape = ("--num-instances=2", "--num-replicas=4")
    job = start(*shape, *options, sys.executable, str(PROGRAM), *words).finish(LIMIT_S)
    assert job.status == 0, job.stderr
    assert ("SIGKILL" in job.stderr) == any("kill" in option for option in options), job.stderr
    lines = [line for instance in range(2) for line in job.lines_of(instance) if line.startswith("{")]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def alone() -> dict:
    """Return the results of this process."""
    sys.path.insert(0, str(PROGRAM.parent))
    from keras_training import train

    return json.loads(json.dumps(train(strategies.IPUStrategy(4))))


@pytest.mark.complete
def test_the_survivor_of_a_killed_instance_ends_with_the_same_bits(alone: dict) -> None:
    assert train("--on-failure=shrink", "--inject=kill:instance=0,step=7") == [alone]


@pytest.mark.complete
@pytest.mark.parametrize("lost", [0, 1])
def test_the_survivor_goes_on_with_checkpoints(lost: int, tmp_path: Path) -> None:
    """A training that is started again then resumes from a checkpoint of the survivor."""
    from keras_training import train as train_here

    folders = [str(tmp_path / f"{name}.checkpoints") for name in ("alone", "survivor")]
    expected = json.loads(json.dumps(train_here(strategies.IPUStrategy(4), folders[0])))
    found = train("--on-failure=shrink", f"--inject=kill:instance={lost},step=7", words=(folders[1],))
    assert found == [expected]
    resumed = train(words=(folders[1],))
    assert [each["variables"] for each in resumed] == [expected["variables"]] * 2


@pytest.mark.complete
def test_a_restarted_job_resumes_from_a_backup_with_the_same_bits(alone: dict, tmp_path: Path) -> None:
    options = ("--on-failure=restart", "--inject=kill:instance=1,step=8")
    assert train(*options, words=(str(tmp_path / "backups"),)) == [alone] * 2
