"""Backward passes in two parts: the bits of a whole pass, and no layer that can be divided computes twice."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strategies import StrategyError
from strategies.pipelines.schedules import schedule_named
from strategies.pipelines.timetable import ActionKind, StageAction, placed
from strategies.torch.micro_batches import weights_behind
from strategies.torch.recorded_graph import recorded
from strategies.torch.split_backward import SplitBackward, SplitPlan

ROWS = 4


class Scale(torch.autograd.Function):
    """A layer that computes both gradients, whichever is needed."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum((0, 1))


class Tangled(nn.Module):
    """A module with parameters used several times by several nodes, hooks, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.frozen, self.table = nn.Linear(8, 8).requires_grad_(False), nn.Embedding(5, 8)
        self.factor = nn.Parameter(torch.randn(8))

    def forward(self, x):
        hidden = x
        for _ in range(3):
            hidden = torch.tanh(self.normed(self.first(hidden) + self.factor) + self.factor * 2)
        hidden = hidden + self.table(torch.tensor([0, 1, 1, 4]))[:, None] + x
        hidden = Scale.apply(self.last(hidden, hidden * self.factor) + self.frozen(hidden), self.factor)
        hidden.register_hook(lambda gradient: gradient * 2)
        return hidden + self.factor.sum()


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Tangled(), nn.Dropout(0.3))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class First(nn.Module):
    """A wrapper that returns the first output of a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


STAGES = {
    "dense": lambda: [
        nn.Sequential(nn.Linear(8, 33), nn.GELU()),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(33, 17), nn.LayerNorm(17), nn.ReLU()),
        nn.Linear(17, 5),
    ],
    "convolutions": lambda: [
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.ConvTranspose2d(6, 3, 2), nn.GroupNorm(3, 3), nn.PReLU(), nn.Flatten(), nn.Linear(48, 5)),
    ],
    "attention": lambda: [nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True) for _ in range(3)],
    "recurrent": lambda: [
        First(nn.LSTM(8, 6, num_layers=2, dropout=0.4, batch_first=True)),
        First(nn.GRU(6, 4, batch_first=True)),
        nn.Linear(4, 2),
    ],
    "tangled": lambda: [Tangled() for _ in range(3)],
    "one stage": lambda: [Tangled()],
    "recomputed": lambda: [Recomputed(), Recomputed(), nn.Linear(8, 8)],
}


def split_of(stages, x, micro_batches=1):
    """Return the loss of a micro-batch and its backward pass in two parts, both still to be run."""
    begins, hidden = [], x
    for stage in stages:
        begins.append(torch._C._autograd._get_sequence_nr())
        hidden = stage(hidden)
    loss = hidden.square().mean() / micro_batches
    graph = recorded(loss, begins)
    return SplitBackward(loss, graph, SplitPlan.of(graph)), loss


@pytest.mark.parametrize("name", STAGES)
def test_gradients_have_the_bits_of_a_whole_backward_pass(name):
    torch.manual_seed(0)
    stages, x = nn.ModuleList(STAGES[name]()), torch.randn(3 * ROWS, 8, 8)
    whole = copy.deepcopy(stages)
    for number, rows in enumerate(x.split(ROWS)):
        torch.manual_seed(number)
        split, _ = split_of(stages, rows, 3)
        before = [None if one.grad is None else one.grad.clone() for one in stages.parameters()]
        split.of_inputs()
        for one, gradient in zip(stages.parameters(), before, strict=True):
            assert (one.grad is None) if gradient is None else torch.equal(one.grad, gradient)
        for stage in range(len(stages)):
            assert number or all(one.grad is None for one in stages[stage:].parameters())
            split.of_weights(stage)
        torch.manual_seed(number)
        _, loss = split_of(whole, rows, 3)
        loss.backward()
    for (name, one), other in zip(stages.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None) is (not one.requires_grad), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


class Counted(TorchDispatchMode):
    """A mode that counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket] += 1
        return function(*args, **(kwargs or {}))


def products_in(function):
    with Counted() as counted:
        function()
    return counted.calls[torch.ops.aten.mm]


def test_products_are_computed_once_in_the_part_that_needs_them():
    split, _ = split_of(
        [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)], torch.ones(4, 8)
    )
    assert products_in(split.of_inputs) == 3, "of the inputs of stages 1 and 2, and of what lies between"
    assert [products_in(lambda stage=stage: split.of_weights(stage)) for stage in range(3)] == [1, 2, 1]


def test_a_parameter_in_two_stages_is_refused():
    layer = nn.Linear(8, 8)
    with pytest.raises(StrategyError, match=r"is used in the stages [12] and [12], .* or use another schedule"):
        split_of([nn.Linear(8, 8), layer, nn.Sequential(nn.Linear(8, 8), layer)], torch.ones(4, 8))


SEVERAL_ON_A_DEVICE = [(0, 1, 0), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (2, 0, 1, 1)]
MAPPINGS = [*(tuple(range(stages)) for stages in range(2, 7)), *SEVERAL_ON_A_DEVICE]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_a_thread_for_each_micro_batch_can_follow_the_timetable(mapping):
    """Forward, back, then weights stage by stage: the timetable never waits for a later action."""
    stages = len(mapping)
    ways = [(ActionKind.FORWARD, range(stages)), (ActionKind.BACKWARD_INPUTS, range(stages)[::-1])]
    ways += [(ActionKind.BACKWARD_WEIGHTS, range(stages))]
    for count in range(stages, 3 * stages + 2):
        timetable = schedule_named("zero_bubble").timetable(placed(mapping), count, True)
        if mapping in SEVERAL_ON_A_DEVICE:
            timetable = weights_behind(timetable)
        queues = [
            [StageAction(kind, stage, number) for kind, order in ways for stage in order] for number in range(count)
        ]
        queues += [
            [action for action in actions if action.kind is not ActionKind.UPDATE] for actions in timetable.devices
        ]
        while heads := Counter(queue[0] for queue in queues if queue):
            done = {action for action, number in heads.items() if number == 2}  # actions of this thread and device
            assert done, f"{stages} stages and {count} micro-batches wait for ever: {heads}"
            queues = [queue[1:] if queue and queue[0] in done else queue for queue in queues]


def test_a_loss_that_is_a_parameter_is_refused():
    with pytest.raises(StrategyError, match=r"the loss is a parameter of shape \[\], .* as 1 \* loss"):
        recorded(nn.Parameter(torch.ones(())), [0])
