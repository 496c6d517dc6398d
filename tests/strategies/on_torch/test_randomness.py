"""Random numbers of threads: each draws from its own generator, as plain PyTorch would with the same seed."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strategies import StrategyError
from strategies.torch.randomness import drawing_from, seed_of


def filled(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return module


def recomputed(reentrant):
    x = torch.ones(8, 8, requires_grad=True)
    result = checkpoint(lambda a: F.dropout(a * a, 0.5), x, use_reentrant=reentrant)
    result.sum().backward()
    assert torch.equal(x.grad, 2 * result.detach()), "the mask of the backward pass is another one"
    return result


def attention():
    x = torch.arange(48.0).view(1, 6, 8) / 48
    return filled(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True))(x, x, x)[0]


DRAWS = {
    "dropout": lambda: F.dropout(torch.ones(9, 9), 0.5),
    "dropout with gradients": lambda: F.dropout(torch.ones(9, 9, requires_grad=True), 0.5),
    "dropout in place": lambda: F.dropout(torch.ones(9, 9), 0.5, inplace=True),
    "dropout of channels": lambda: F.dropout2d(torch.ones(2, 8, 2, 2), 0.5),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(9, 9), 0.5, training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(9), training=True),
    "gumbel softmax": lambda: F.gumbel_softmax(torch.zeros(3, 4)),
    "fractional pooling": lambda: F.fractional_max_pool2d(torch.arange(4096.0).view(1, 1, 64, 64), 2, output_size=20),
    "LSTM": lambda: filled(nn.LSTM(4, 4, num_layers=2, dropout=0.5))(torch.ones(3, 2, 4))[0],
    "attention": attention,
    "scaled dot product": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 6, 8)] * 3, dropout_p=0.5),
    "rand": lambda: torch.rand(5),
    "rand of 64 bits": lambda: torch.rand(5, dtype=torch.float64),
    "randn": lambda: torch.randn(20),
    "randint": lambda: torch.randint(0, 1000, (5,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "randn_like": lambda: torch.randn_like(torch.ones(5)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 1000),
    "normal": lambda: torch.normal(torch.zeros(5), 1.0),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 9),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "poisson": lambda: torch.poisson(torch.full((50,), 9.0)),
    "binomial": lambda: torch.binomial(torch.full((50,), 9.0), torch.full((50,), 0.5)),
    "exponential": lambda: torch.empty(5).exponential_(),
    "geometric": lambda: torch.empty(50).geometric_(0.1),
    "cauchy": lambda: torch.empty(5).cauchy_(),
    "log normal": lambda: torch.empty(5).log_normal_(),
    "random": lambda: torch.empty(5).random_(),
    "beta": lambda: torch.distributions.Beta(1.0, 2.0).sample((5,)),
    "Dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(4)).sample(),
    "initial values": lambda: nn.init.trunc_normal_(torch.empty(4, 4)),
    "a layer": lambda: nn.Linear(4, 4).weight,
    "recomputed": lambda: recomputed(False),
    "recomputed reentrantly": lambda: recomputed(True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_thread_draws_what_plain_pytorch_draws_with_that_seed(draw):
    torch.manual_seed(11)
    expected = [draw().detach().clone() for _ in range(2)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with drawing_from(11):
        drawn = [draw().detach().clone() for _ in range(2)]
    assert all(map(torch.equal, drawn, expected))
    assert torch.equal(torch.get_rng_state(), before), "something was drawn from the process's generator"
    assert not torch.equal(*drawn)


def test_threads_that_draw_concurrently_do_not_disturb_each_other():
    def draw(seed):
        with drawing_from(seed):
            return [F.dropout(torch.ones(16), 0.5) + torch.rand(16) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(draw, range(8)))
    alone = [draw(seed) for seed in range(8)]
    for one, other in zip(at_once, alone, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_generator_that_is_given_is_used():
    with drawing_from(1):
        drawn = torch.rand(5, generator=torch.Generator().manual_seed(9))
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(9)))


def test_saved_and_restored_states_are_those_of_the_thread():
    with drawing_from(1):
        state = torch.get_rng_state()
        drawn = torch.rand(5)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(5), drawn)


def test_after_an_error_the_thread_draws_from_the_process_again():
    def fail():
        with drawing_from(1):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    torch.manual_seed(4)
    drawn = torch.rand(5)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(5), drawn)


def test_seeds_differ_for_each_replica_step_and_micro_batch():
    seeds = {seed_of(*words) % 2**32 for words in itertools.product((0, 1), repeat=4)}
    assert len(seeds) == 16


def test_compiled_code_draws_its_seeds_from_the_thread_even_in_its_first_call():
    """The first call runs under a dispatch mode that hides the dispatch key of the thread."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def drawn():
        found = torch.empty(3, dtype=torch.int64)
        torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [3], out=found)
        return found.tolist()

    with drawing_from(5):
        expected = drawn()
    with drawing_from(5), Mode():
        assert drawn() == expected
    torch.manual_seed(5)
    assert drawn() == expected


def test_replicas_do_not_draw_from_one_generator_of_the_program():
    shared = torch.Generator()

    def draw(replica, generator=shared):
        with drawing_from(seed_of(0, replica, 0), replica=replica):
            return torch.rand(3, generator=generator)

    for _ in range(2):
        draw(1)
    with pytest.raises(StrategyError, match=r"replicas 1 and 0 draw from one torch\.Generator"):
        draw(0)
    assert torch.equal(draw(0, torch.Generator().manual_seed(7)), draw(1, torch.Generator().manual_seed(7)))
    torch.rand(3, generator=shared)  # outside of replicas
