"""Fixtures for strategies: XLA's thread pool is fixed before JAX starts, and instances run on threads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiling import compile_one_after_another, compile_what_calls_python_once
from connected import ConnectedStrategy

import collectives
import strategies
from collectives.backends.thread import run_on_threads
from popdist import Instance

compile_one_after_another()
compile_what_calls_python_once()
ALL = strategies.IPUStrategy(num_replicas=8)  # the size of the pool is fixed when JAX starts
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/collectives", "tests/jobs", "tests/strategies/programs")]


@pytest.fixture
def strategy():
    """Provide a strategy of four replicas in this process."""
    return strategies.IPUStrategy(num_replicas=4)


@pytest.fixture
def bits():
    """Provide a function that returns the bits of a value as bytes."""

    def of(value):
        array = np.asarray(value)
        return array.dtype, array.shape, array.tobytes()

    return of


@pytest.fixture
def on_instances():
    """Provide a function that runs `function(strategy)` on n instances in n threads, with results in order."""

    def run(instances, replicas, function, mechanism="ring", ipus_per_replica=1, **options):
        local = replicas // instances

        def one(communicator):
            index = communicator.rank
            own = {"ipus_per_replica": ipus_per_replica}
            instance = Instance(index, instances, local, index * local, replicas, index, **own)
            return function(ConnectedStrategy(instance, communicator, **options))

        settings = collectives.Settings(mechanism=mechanism)
        return run_on_threads(instances, one, settings)

    return run


@pytest.fixture
def pretend_one_core(monkeypatch):
    """Provide a function after which this process seems to have one core. Restores what strategies then tell JAX."""
    import jax

    name = "jax_cpu_enable_async_dispatch"
    before = jax.config.values[name]
    yield lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    jax.config.update(name, before)


@pytest.fixture
def in_new_process():
    """Provide a function that runs a program in a Python whose JAX has not started, and returns its output."""

    def run(program, *words, **variables):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT_", "XLA_", "JAX_", "POPDIST_"))}
        finished = subprocess.run(
            [sys.executable, "-c", program, *map(str, words)],
            env=clean | {"PYTHONPATH": str(ROOT)} | variables,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run
