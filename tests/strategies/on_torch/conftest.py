"""Fixtures for tests that need PyTorch; without PyTorch these tests are not collected."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def process_generator():
    """Restore the generator of the process after each test."""
    import torch

    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.fixture(autouse=True)
def closed_trainers():
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
