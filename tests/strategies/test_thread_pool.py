"""Thread pool of XLA, whose size decides the division of a matrix product; the strategy fixes it."""

import os

import pytest

pytestmark = pytest.mark.timeout(300)  # some start four processes, one after another

PROGRAM = """\
import hashlib, os, sys
replicas = int(sys.argv[1])
import strategies
strategy = strategies.IPUStrategy(num_replicas=replicas)
import jax, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
w = np.random.default_rng(1).standard_normal((1024, 1024)).astype(np.float32)
gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
results = strategy.run(gradient, args=(w, x))
print(os.environ["PJRT_NPROC"], *sorted({hashlib.sha256(r.tobytes()).hexdigest() for r in results}))
"""


PRINTED = {}


@pytest.fixture
def on_replicas(in_new_process):
    """Return the output of the program, run once for each number of replicas."""

    def run(replicas):
        if replicas not in PRINTED:
            PRINTED[replicas] = in_new_process(PROGRAM, replicas)
        return PRINTED[replicas]

    return run


@pytest.mark.complete
@pytest.mark.parametrize("counts", [(1, 8), (1, 2, 4, 8)], ids=str)
def test_a_large_gradient_has_the_same_bits_on_any_number_of_devices(on_replicas, counts):
    printed = {on_replicas(replicas) for replicas in counts}
    assert len(printed) == 1
    assert len(printed.pop().split()) == 2


def test_a_large_gradient_has_the_same_bits_on_one_core(in_new_process, on_replicas):
    cores = os.sched_getaffinity(0)
    everywhere = on_replicas(8)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert in_new_process(PROGRAM, 1) == everywhere
    finally:
        os.sched_setaffinity(0, cores)


def test_the_size_is_set_before_jax_starts(in_new_process):
    program = (
        "import os, strategies\n"
        "assert 'PJRT_NPROC' not in os.environ\n"
        "strategies.IPUStrategy(num_replicas=12)\n"
        "print(os.environ['PJRT_NPROC'])\n"
    )
    assert in_new_process(program) == "12\n"


def test_the_size_is_set_again_if_the_program_puts_back_its_variables(in_new_process):
    program = (
        "import os, strategies\n"
        "before = dict(os.environ)\n"
        "strategies.IPUStrategy(num_replicas=12)\n"
        "os.environ.clear()\n"
        "os.environ.update(before)\n"
        "import jax\n"
        "print(os.environ['PJRT_NPROC'])\n"
    )
    assert in_new_process(program) == "12\n"


@pytest.mark.complete
def test_the_size_that_the_user_has_set_stays(in_new_process):
    program = "import os, strategies\nstrategies.IPUStrategy(2)\nprint(os.environ['PJRT_NPROC'])\n"
    assert in_new_process(program, PJRT_NPROC="16") == "16\n"
