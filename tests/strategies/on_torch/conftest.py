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
