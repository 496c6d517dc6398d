"""Connection of JAX's processes: before JAX starts, or an error names the instance that came too late."""

import os
import re

import jax
import pytest
from poprun_jobs import LIMIT_S, run, start, two

from popdist.xla import own_autotuning_setting
from strategies.jax.replicas.processes import (
    RuntimeState,
    no_proxy_setting,
    own_process,
    runtime_state,
    why_unconnected,
)

NEW, CONNECTED, ALONE, ELSEWHERE = RuntimeState


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ([NEW, NEW], ""),
        ([CONNECTED, CONNECTED, CONNECTED], ""),
        ([NEW, ALONE], "on instance 1 JAX started before"),
        ([ALONE, NEW, ALONE], "on instances 0, 2 JAX started before"),
        ([ELSEWHERE, ELSEWHERE], "on instances 0, 1 jax.distributed.initialize was called for another number"),
        ([CONNECTED, NEW], "jax.distributed.initialize was called on instance 0 only"),
    ],
)
def test_processes_can_be_connected_unless_jax_has_started(states, why):
    found = why_unconnected(states)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_a_single_process_starts_without_others():
    assert jax.process_count() == 1  # starts JAX
    assert runtime_state(2) == ALONE
    assert own_process() is None


HEAD = """\
import os, signal, sys
import jax, numpy as np, optax
import strategies
from strategies.defaults import Defaults
asked = Defaults(exchange="compiled")
"""
TRAIN = """
strategy = strategies.PopDistStrategy(defaults=asked)
def loss(variables, batch, key):
    return (variables["w"] * batch).mean(), {}
trainer = strategies.Trainer(strategy, loss, optax.sgd(0.1))
state = trainer.init({"w": np.ones(5, np.float32)})
for step in range(100):
    if step == 3 and strategy.instance_index == 0:
        print(f"collective {strategy.communicator.calls_made + 1} is next", flush=True)
        open(sys.argv[1]).close()  # returns when the test opens the pipe for writing
        END
    state, metrics = trainer.step(state, np.ones((1, 5), np.float32))
"""


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("end", "status", "first"),
    [
        pytest.param(
            *("raise RuntimeError('my own words')", 1, r"instance 0 .* ended with exit status 1"),
            marks=pytest.mark.complete,
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"instance 0 .* was killed by SIGKILL"),
    ],
)
def test_the_end_of_the_coordinator_is_reported_like_that_of_any_instance(end, status, first, tmp_path):
    """The coordinator ends when instance 1 has reported that it waits in the collective of the same step."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = start(*two(HEAD + TRAIN.replace("END", end)), str(pipe), environ={"POPDIST_STALL_WARNING_S": "0.2"})
    job.wait_for(" is next\n")
    [number] = re.findall(r"collective (\d+) is next", job.streams[0].text)
    waits = job.streams[1].wait_for(f"(collective {number})".encode(), LIMIT_S)
    pipe.write_text("")
    finished = job.finish()
    assert waits, finished.stderr
    assert finished.status == status, finished.stderr
    assert re.match(first, finished.own_lines[0]), finished.own_text
    assert "instance 1 was in collective" in finished.own_text
    assert "Process received signal" not in finished.stderr  # Open MPI's trace of C++


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.timeout(120)
def test_a_program_that_has_started_jax_is_refused():
    finished = run(*two(HEAD + "jax.devices()" + TRAIN))
    assert finished.status == 1
    assert "JAX started before it could be connected with the JAX of all 2 instances" in finished.stderr


@pytest.mark.parametrize(
    ("flags", "then"),
    [
        ("", "--xla_gpu_shard_autotuning=false"),
        ("--xla_gpu_deterministic_ops=true", "--xla_gpu_deterministic_ops=true --xla_gpu_shard_autotuning=false"),
        ("--xla_gpu_shard_autotuning=true", None),
    ],
)
def test_an_instance_compiles_alone_by_default(flags, then):
    assert own_autotuning_setting({"XLA_FLAGS": flags}) == ({} if then is None else {"XLA_FLAGS": then})


@pytest.mark.parametrize(
    ("environ", "address", "without"),
    [
        ({}, "10.0.0.1:80", "10.0.0.1"),
        ({"no_proxy": "a,b"}, "[fe80::1]:80", "a,b,fe80::1"),
        ({"no_proxy": "a", "no_grpc_proxy": "c"}, "10.0.0.1:80", "c,10.0.0.1"),
    ],
)
def test_the_coordinator_is_excluded_from_proxies(environ, address, without):
    assert no_proxy_setting(environ, address) == {"no_grpc_proxy": without}
