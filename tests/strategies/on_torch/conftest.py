"""Fixtures for tests that need PyTorch; without PyTorch these tests are not collected."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


def settings_of_torch():
    """Return settings of PyTorch that hold for the whole process, or for the thread of all tests."""
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "filling of new memory": torch.utils.deterministic.fill_uninitialized_memory,
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "detection of anomalies": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }


@pytest.fixture(autouse=True)
def process_state():
    """Restore the generators of the process after each test, and check that the test has changed no setting."""
    import random

    import numpy as np
    import torch

    settings = settings_of_torch()
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(generators[0])
    np.random.set_state(generators[1])
    random.setstate(generators[2])
    after = settings_of_torch()
    changed = {name: (before, after[name]) for name, before in settings.items() if after[name] != before}
    assert not changed, f"the test has changed settings of PyTorch for all tests after it: {changed}"


@pytest.fixture(autouse=True)
def loaders_begin_alone(monkeypatch):
    """Let loaders of PyTorch begin while no replica of another instance computes or draws.

    A loader that begins draws a seed from PyTorch's generator, which instances on threads share.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from strategies.data.randomness import of_program

    begin = _BaseDataLoaderIter.__init__

    def begin_alone(iterator, loader):
        with of_program.drawing():
            begin(iterator, loader)

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", begin_alone)


@pytest.fixture(autouse=True)
def closed_trainers(process_state):
    """Close the trainers of `sgd_trainer` after each test."""
    from torch_modules import close_trainers

    yield
    close_trainers()


@pytest.fixture(scope="module")
def module():
    """Provide convolutions with batch norm and dropout, for tests that copy them."""
    from torch_modules import new_module

    return new_module("convolutions")


@pytest.fixture
def everywhere(on_instances):
    """Provide a function that runs another on 1, 2 and 4 instances, up to one per replica, and lists all results."""

    def run(replicas, function):
        counts = [count for count in (1, 2, 4) if count <= replicas]
        return [found for count in counts for found in on_instances(count, replicas, function)]

    return run


@pytest.fixture
def on_path(on_instances, monkeypatch):
    """Provide a function that runs another one on instances with a path of gradients; the CPU acts as device."""

    def run(path, *arguments):
        with monkeypatch.context() as patch:
            patch.setenv("POPDIST_EXCHANGE", path)
            return on_instances(*arguments)

    return run


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Limit plain PyTorch to one thread for comparisons, since replicas have one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
