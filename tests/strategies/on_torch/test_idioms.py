"""Idioms of PyTorch: one replica has the bits of plain PyTorch, and several have the same bits on all instances."""

from __future__ import annotations

import pytest
import torch
from idiom import bits_of, by_loop, by_plain_pytorch, by_trainer, named
from idioms_of_losses import LOSSES
from idioms_of_modules import LAYERS, WRAPPERS
from idioms_of_optimizers import OPTIMIZERS
from idioms_of_programs import CHANGES, HOOKS
from tiers import first_of

import strategies

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
IDIOMS = named([*LAYERS, *WRAPPERS, *OPTIMIZERS, *LOSSES, *HOOKS, *CHANGES])
REPLICAS = 4


def rows(condition=lambda idiom: True):
    """Return a decorator that makes a test case of each selected row."""
    chosen = [idiom for idiom in IDIOMS.values() if condition(idiom)]
    marks = [[pytest.mark.skip(reason=idiom.waiting)] if idiom.waiting else [] for idiom in chosen]
    cases = [pytest.param(idiom, id=idiom.name, marks=mark) for idiom, mark in zip(chosen, marks, strict=True)]
    return pytest.mark.parametrize("idiom", cases)


@rows(lambda idiom: (not idiom.refused or idiom.refused_from > 1) and idiom.is_plain)
def test_one_replica_has_the_bits_of_plain_pytorch(idiom):
    found, expected = by_trainer(idiom, strategies.IPUStrategy(1)), by_plain_pytorch(idiom)
    if idiom.tolerance:
        torch.testing.assert_close(found, expected, rtol=idiom.tolerance, atol=idiom.tolerance)
    else:
        assert bits_of(found) == bits_of(expected)


@rows(lambda idiom: not idiom.refused)
@pytest.mark.parametrize("instances", first_of([2, 4]))
def test_the_bits_do_not_depend_on_the_instances(idiom, instances, on_instances):
    expected = bits_of(by_trainer(idiom, strategies.IPUStrategy(REPLICAS)))
    found = on_instances(instances, REPLICAS, lambda strategy: by_trainer(idiom, strategy))
    assert [bits_of(one) for one in found] == [expected] * instances


@rows(lambda idiom: idiom.has_loop)
def test_a_loop_has_the_bits_of_a_trainer(idiom, on_instances):
    expected = bits_of(by_trainer(idiom, strategies.IPUStrategy(2)))[0]
    assert [bits_of(one)[0] for one in on_instances(2, 2, lambda s: by_loop(idiom, s))] == [expected] * 2


@rows(lambda idiom: idiom.refused)
def test_refused_idioms_raise_the_reason_on_all_instances(idiom, on_instances):
    def refused(strategy):
        with pytest.raises(Exception, match=idiom.refused):
            by_trainer(idiom, strategy)

    for instances in (1, 2):
        on_instances(instances, REPLICAS, refused)
