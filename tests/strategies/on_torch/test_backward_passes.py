"""Models that take part in one backward pass exchange in an order that all instances share."""

from __future__ import annotations

import _thread
import queue

import numpy as np
import pytest
import torch

from strategies.exchange.flat import GradientTransfer
from strategies.torch.distributed_model.passes import BackwardPasses, ModelPass, is_nested
from strategies.torch.exchange.plan import Parameter, TorchGradientPlan

LARGE = Parameter("large", (1 << 20,), np.dtype(np.float32))
PLAN = TorchGradientPlan((LARGE,) * 3, GradientTransfer.parse(None), streams=True)  # three buckets


class Recording:
    """A model that records the calls it gets."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def reduce(self, bucket):
        self.log.append(f"{self.name}{bucket}")

    def fill(self, round_):
        for number in range(3):
            if number not in round_.taken:
                round_.take(number)

    def conclude(self):
        self.log.append(f"{self.name} ends")

    def ended_without_gradients(self):
        self.log.append(f"{self.name} has none")


def backward(within):
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda gradient: within())
        x.sum().backward()


@pytest.mark.parametrize("first_takes", [[], [2], [2, 1], [0, 1, 2]])
def test_buckets_of_a_later_model_leave_after_those_of_the_first_model(first_takes):
    log, passes = [], BackwardPasses()

    def within():
        passes.enter()
        first, second = (ModelPass(Recording(name, log), PLAN, passes.tasks) for name in "ab")
        passes.running += [first, second]
        for number in (2, 1, 0):
            second.take(number)
            passes.begin_ready(passes.running)
        for number in first_takes:
            first.take(number)
            passes.begin_ready(passes.running)

    backward(within)
    assert log == ["a0", "a1", "b0", "b1", "a ends", "b ends"]


def test_a_model_reached_without_gradients_is_notified():
    log, passes = [], BackwardPasses()
    one, other = Recording("one", log), Recording("other", log)

    def within():
        passes.enter()
        passes.reached += [one, other]
        passes.running.append(ModelPass(other, PLAN, passes.tasks))

    backward(within)
    assert log == ["one has none", "other0", "other1", "other ends"]


def test_a_pass_that_fails_is_forgotten():
    passes = BackwardPasses()

    def fail():
        passes.enter()
        passes.tasks.add(-7)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        backward(fail)
    tasks = []

    def enter():
        passes.enter()
        tasks.extend(passes.tasks)

    backward(enter)
    assert -7 not in tasks


def test_calls_within_calls_are_nested():
    found = []

    def within():
        found.append(is_nested())
        backward(lambda: found.append(is_nested()))

    assert not is_nested()
    backward(within)
    assert found == [False, True]


def test_a_pass_in_a_thread_of_autograd_is_nested_if_its_beginning_is_seen():
    """The outermost call is in a thread of the accelerator's autograd engine, which Python did not start."""
    found = queue.SimpleQueue()

    def run():
        found.put(is_nested())
        backward(lambda: found.put(is_nested()))

    _thread.start_new_thread(run, ())
    assert [found.get(timeout=30), found.get(timeout=30)] == [False, True]
    backward(lambda: found.put(is_nested()))
    assert not found.get_nowait()
