"""Random numbers of replicas: each draws from the process's generators, seeded as plain PyTorch would be."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from idiom import CLASSES, FEATURES, classify, drawn, rows_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_modules import sgd_trainer

from strategies.torch import seed_of
from strategies.torch.replicas.generators import (
    Baton,
    drawing_from,
    has_baton,
    kept_generators,
    lent_baton,
    seed_generators,
)

CPU, REPLICAS = torch.device("cpu"), 4
LIMIT_S = 20


def numbers():
    """Draw from the three generators of the process."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002


def seeded_by_hand(seed):
    """Seed the generators as a program without this library does."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


# ---- seeds


def test_seeds_differ_for_each_training_replica_step_and_micro_batch():
    seeds = {seed_of(*words) % 2**32 for words in itertools.product((0, 1), repeat=4)}
    assert len(seeds) == 16


def test_a_seed_without_a_micro_batch_is_that_of_the_first():
    assert seed_of(3, 2, 7) == seed_of(3, 2, 7, 0)
    assert 0 <= seed_of(3, 2, 7) < 2**64


def metrics_of(strategy, draws, micro_batches=1, seed=0):
    """Return what each local replica and micro-batch draws in a step, by (replica, step, micro-batch)."""
    found, trainer = {}, None

    def loss(module, batch):
        return classify(module, batch), {}, {"drawn": torch.tensor(draws(), dtype=torch.float64)}

    module = drawn(lambda: nn.Linear(FEATURES, CLASSES))
    trainer = sgd_trainer(strategy, module, loss, seed=seed, gradient_accumulation_count=micro_batches)
    local = strategy.local_replicas
    for step in range(3):
        trainer.step(rows_of(step, local))
        for replica, of_replica in zip(local, trainer.outputs, strict=True):
            for number, output in enumerate(of_replica):
                found[replica, step, number] = output["drawn"].tolist()
    return found


@pytest.mark.parametrize(("micro_batches", "seed"), [(1, 0), (2, 9)])
def test_replicas_draw_what_a_program_draws_with_their_seeds(micro_batches, seed, on_instances):
    for instances in (1, 2, 4):
        of_all = on_instances(instances, REPLICAS, lambda strategy: metrics_of(strategy, numbers, micro_batches, seed))
        found = {place: one for of_instance in of_all for place, one in of_instance.items()}
        assert len(found) == REPLICAS * 3 * micro_batches
        for place, one in found.items():
            seeded_by_hand(seed_of(seed, *place))
            assert one == list(numbers())


# ---- every kind of draw


def recomputed(reentrant):
    x = torch.ones(8, 8, requires_grad=True)
    result = checkpoint(lambda a: F.dropout(a * a, 0.5), x, use_reentrant=reentrant)
    result.sum().backward()
    assert torch.equal(x.grad, 2 * result.detach()), "the mask of the backward pass is another one"
    return result


DRAWS = {
    "dropout": lambda: F.dropout(torch.ones(9, 9), 0.5),
    "LSTM": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5)(torch.ones(3, 2, 4))[0],
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 6, 8)] * 3, dropout_p=0.5),
    "randn": lambda: torch.randn(20),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 9),
    "binomial": lambda: torch.binomial(torch.full((50,), 9.0), torch.full((50,), 0.5)),
    "exponential": lambda: torch.empty(5).exponential_(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(4)).sample(),
    "recomputed": lambda: recomputed(False),
    "recomputed reentrantly": lambda: recomputed(True),
    "normal numbers of NumPy, an odd number": lambda: torch.tensor(np.random.normal(size=3)),  # noqa: NPY002
    "choices of NumPy": lambda: torch.from_numpy(np.random.permutation(9)),  # noqa: NPY002
    "Python's normal numbers, which come in pairs": lambda: torch.tensor(random.gauss(0, 1)),
    "a shuffled list": lambda: torch.tensor(random.sample(range(20), 9)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_part_draws_what_plain_pytorch_draws_and_leaves_no_trace(draw):
    seeded_by_hand(11)
    expected = [draw().detach().clone() for _ in range(2)]
    seeded_by_hand(5)
    before = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    with drawing_from(11, CPU):
        assert all(torch.equal(draw().detach(), one) for one in expected)
    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


def test_a_half_drawn_pair_of_normal_numbers_belongs_to_the_program():
    """NumPy and Python draw normal numbers in pairs, and keep the second."""
    seeded_by_hand(5)
    expected = [(np.random.standard_normal(), random.gauss(0, 1)) for _ in range(4)]  # noqa: NPY002
    seeded_by_hand(5)
    found = []
    for _ in range(4):
        found.append((np.random.standard_normal(), random.gauss(0, 1)))  # noqa: NPY002
        with drawing_from(7, CPU):
            np.random.standard_normal()  # noqa: NPY002
            random.gauss(0, 1)
    assert found == expected


def test_a_generator_that_is_given_is_used():
    with drawing_from(1, CPU):
        drawn_there = torch.rand(5, generator=torch.Generator().manual_seed(9))
    assert torch.equal(drawn_there, torch.rand(5, generator=torch.Generator().manual_seed(9)))


def test_after_an_error_the_program_goes_on_with_its_numbers():
    seeded_by_hand(4)
    expected = numbers()

    def fail():
        with drawing_from(1, CPU):
            numbers()
            raise KeyError

    seeded_by_hand(4)
    with pytest.raises(KeyError):
        fail()
    assert numbers() == expected
    assert not has_baton()


def test_parts_may_lie_in_each_other():
    with drawing_from(1, CPU):
        expected = [numbers(), numbers()]
    with drawing_from(1, CPU):
        found = [numbers()]
        with drawing_from(2, CPU):
            numbers()
        found.append(numbers())
    assert found == expected


# ---- threads


def test_threads_that_draw_at_the_same_time_do_not_disturb_each_other():
    def draw(seed):
        with drawing_from(seed, CPU):
            return [numbers() for _ in range(50)]

    seeded_by_hand(3)
    expected = numbers()
    alone = [draw(seed) for seed in range(8)]
    seeded_by_hand(3)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(8))) == alone
    assert numbers() == expected


def test_a_replica_that_waits_comes_back_to_its_own_numbers():
    """Two replicas meet after each draw, so each of them waits while the other one draws."""
    meet = threading.Barrier(2)

    def draw(seed):
        found, states = [], []
        with kept_generators(CPU), Baton(CPU, lambda: leave(states, seed)):
            seed_generators(seed, CPU)
            for _ in range(3):
                found.append(numbers())
                with lent_baton():
                    meet.wait(LIMIT_S)
        return found, states

    def leave(states, seed):
        states.append("left")
        return lambda: states.append("came back")

    expected = []
    for seed in (1, 2):
        with drawing_from(seed, CPU):
            expected.append([numbers() for _ in range(3)])
    seeded_by_hand(8)
    of_program = numbers()
    seeded_by_hand(8)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(draw, (1, 2)))
    assert [one for one, _ in found] == expected
    assert all(states[::2] == ["left"] * len(states[::2]) for _, states in found)
    assert all(states[1::2] == ["came back"] * (len(states) // 2) for _, states in found)
    assert all(len(states) % 2 == 0 for _, states in found)
    assert numbers() == of_program


def test_the_last_thread_that_leaves_gives_the_program_its_numbers_back():
    seeded_by_hand(8)
    expected = numbers()
    seeded_by_hand(8)
    inside, may_leave = threading.Barrier(2), threading.Event()

    def stay():
        with kept_generators(CPU):
            inside.wait(LIMIT_S)
            assert may_leave.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stay)
        with kept_generators(CPU):
            inside.wait(LIMIT_S)
            seed_generators(1, CPU)
            numbers()
        may_leave.set()
        other.result(LIMIT_S)
    assert numbers() == expected


def test_only_the_thread_of_a_replica_has_the_baton():
    with kept_generators(CPU), Baton(CPU):
        assert has_baton()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(has_baton).result(LIMIT_S)
    assert not has_baton()
    with lent_baton():  # a thread without a baton only waits
        pass
