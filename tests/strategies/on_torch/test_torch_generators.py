"""Generators of the process: replicas seed them, and the program gets its own states back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch_modules import sgd_trainer

from strategies.torch.replica_memory import HOST
from strategies.torch.replicas.generators import drawing_from, seed_of


def draws():
    """Return a number of each generator that replicas seed."""
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002


def seed_all():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002


def test_seeds_differ_for_each_replica_step_and_micro_batch():
    seeds = {seed_of(*words) % 2**32 for words in itertools.product((0, 1), repeat=4)}
    assert len(seeds) == 16


def test_the_program_goes_on_as_if_replicas_had_drawn_nothing():
    """A replica draws the numbers of its seed, also after other draws."""
    seed_all()
    expected, found = draws(), []

    def loss(module, batch):
        found.append(draws())
        return module(batch).mean()

    trainer = sgd_trainer(2, torch.nn.Linear(2, 1), loss)
    seed_all()
    trainer.step(torch.ones(2, 2))
    assert draws() == expected
    assert found[2] == found[0] != found[1], "the first replica computes once more"
    torch.manual_seed(seed_of(0, 1, 0))
    assert found[1][0] == torch.rand(()).item()


def test_the_program_goes_on_after_an_error():
    seed_all()
    expected = draws()
    seed_all()

    def fail():
        with drawing_from(1, HOST):
            draws()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draws() == expected


def test_code_inside_goes_on_after_code_with_a_seed_of_its_own():
    with drawing_from(3, HOST):
        expected = [draws(), draws()]
    with drawing_from(3, HOST):
        found = [draws()]
        with drawing_from(4, HOST):
            assert draws() not in expected
        found.append(draws())
    assert found == expected
