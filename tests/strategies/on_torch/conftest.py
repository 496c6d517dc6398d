"""These tests need PyTorch, and are left out where it is not installed."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def process_generator():
    """No test draws from the generator of the process, or leaves it otherwise, without noticing: it is put back."""
    import torch

    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.fixture(autouse=True)
def closed_trainers():
    """Trainers of `sgd_trainer` end with their test."""
    from torch_modules import close_trainers

    yield
    close_trainers()


@pytest.fixture
def everywhere(on_instances):
    """Run a function on one, two and four instances, as far as there are replicas: its results, all in one list."""

    def run(replicas, function):
        counts = [count for count in (1, 2, 4) if count <= replicas]
        return [found for count in counts for found in on_instances(count, replicas, function)]

    return run


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For what plain PyTorch computes here, to be compared: replicas have one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
