"""The listing of estimators: the same bits in two terminals, in one process, and under mpirun with Horovod."""

import json
import socket
import sys
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from horovod_installed import needs_horovod
from jobs import poprun_jobs

LIMIT_S = 120
STEPS = "30"
LISTING = (sys.executable, "-m", "popdist.examples.listings.estimator_workers", "--num-steps", STEPS)

pytestmark = [
    pytest.mark.complete,
    pytest.mark.job,
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(not (find_spec("keras") and find_spec("sklearn")), reason="Keras or scikit-learn is missing"),
]


def free_addresses(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"localhost:{one.getsockname()[1]}" for one in sockets]


def workers(count, *options):
    """Return the last line of each worker, started as in a terminal of its own."""
    cluster = {"worker": free_addresses(count)}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(count)]
    environs = [{"TF_CONFIG": json.dumps(task), "KERAS_BACKEND": "jax"} for task in tasks]
    started = [poprun_jobs.start_command(*LISTING, *options, environ=environ) for environ in environs]
    ended = [job.finish(LIMIT_S) for job in started]
    assert [one.status for one in ended] == [0] * count, [one.stderr for one in ended]
    return [one.stdout.splitlines()[-1] for one in ended]


@pytest.fixture(scope="module")
def alone():
    [line] = workers(1)
    return line


@pytest.mark.cores(2)
def test_two_terminals_have_the_bits_of_one_process(alone, tmp_path):
    assert workers(2, "--model-dir", str(tmp_path / "model")) == [alone] * 2
    assert (tmp_path / "model" / f"step_{int(STEPS):08d}").is_dir()


@needs_horovod
@pytest.mark.cores(2)
def test_horovod_adds_two_workers_to_the_same_bits(alone):
    finished = poprun_jobs.start_mpirun(2, *LISTING, environ={"KERAS_BACKEND": "jax"}).finish(LIMIT_S)
    assert finished.status == 0, finished.stderr
    assert [finished.lines_of(index)[-1] for index in (0, 1)] == [alone] * 2
