"""Modules in the style of PopTorch's tutorials and examples; each returns its outputs and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import strategies.torch.poptorch as poptorch

WIDTH, CLASSES = 6, 3


def data(rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def rows(count, outputs=1):
    """Return inputs and targets of a `Line`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, generator=generator), torch.randn(count, outputs, generator=generator)


def new_options(strategy=None, replicas=1, iterations=1, accumulation=1, mode=None):
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        options._strategy = strategy
    return options if mode is None else options.outputMode(mode)


class Line(nn.Module):
    """A linear layer that returns its mean squared error."""

    def __init__(self, outputs=1):
        super().__init__()
        self.layer = nn.Linear(3, outputs)

    def forward(self, x, y):
        with poptorch.Block("B1", ipu_id=0):
            return poptorch.identity_loss((self.layer(x) - y).square(), "mean")


class Net(nn.Module):
    """Two layers with `middle` between them; `loss` and `returned` select variants."""

    def __init__(self, middle=None, loss=F.cross_entropy, returned=lambda output, loss: (output, loss)):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.middle = middle or nn.Identity()
        self.loss, self.returned = loss, returned

    def forward(self, x, labels=None):
        output = self.last(torch.tanh(self.middle(self.first(x))))
        return output if labels is None else self.returned(output, self.loss(output, labels))


def net(middle=None, **others):
    """Return a function that makes a net; the call comes after the seed is set."""
    return lambda: Net(middle() if middle else None, **others)


def computing(function):
    """Return a function that makes a net whose middle layer is `function`."""

    class Computing(nn.Module):
        def forward(self, x):
            return function(x)

    return net(Computing)


class Scopes(Net):
    """Blocks as scopes, on devices if `ipus` names them."""

    def __init__(self, ipus=(None, None)):
        super().__init__()
        self.ipus = ipus

    def forward(self, x, labels):
        with poptorch.Block("B1", ipu_id=self.ipus[0]):
            hidden = torch.tanh(self.first(x))
        with poptorch.Block("B2", ipu_id=self.ipus[1]):
            output = self.last(hidden)
            return output, F.cross_entropy(output, labels)


class Numbered(Net):
    """Blocks without names."""

    def forward(self, x, labels):
        poptorch.Block.useAutoId()
        with poptorch.Block():
            hidden = torch.tanh(self.first(x))
        with poptorch.Block():
            output = self.last(hidden)
            return output, F.cross_entropy(output, labels)


class Started(Net):
    """Blocks that last until the next one begins, one of them a decorated function."""

    def forward(self, x, labels):
        poptorch.Block.start("B1", ipu_id=0)
        hidden = torch.tanh(self.first(x))
        return self.end(hidden, labels)

    @poptorch.BlockFunction("B2", ipu_id=1)
    def end(self, hidden, labels):
        output = self.last(hidden)
        return output, F.cross_entropy(output, labels)


def begun():
    """Return a module whose blocks begin with submodules."""
    model = Net()
    poptorch.BeginBlock(model.first, "B1", ipu_id=0)
    poptorch.BeginBlock(model.last, "B2", ipu_id=1)
    return model


def unmarked():
    """Return the module of `begun` without its marks."""
    model = begun()
    poptorch.removeBlocks(model)
    return model


class Tied(Net):
    """A module that uses the same weights twice."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.again.weight
        self.middle = nn.Sequential(self.again, self.other)


class Frozen(Net):
    """A module with a layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class Halves(Net):
    """A module in 16 bits, except for its loss."""

    def __init__(self):
        super().__init__()
        self.half()

    def forward(self, x, labels):
        output = self.last(torch.tanh(self.first(x.half())))
        return output, F.cross_entropy(output.float(), labels)


class Cast(Net):
    """A module whose layers run in 16 bits by casts."""

    def forward(self, x, labels):
        with poptorch.autocast(dtype=torch.bfloat16):
            output = self.last(torch.tanh(self.first(x)))
        return output, F.cross_entropy(output.float(), labels)


class Asking(Net):
    """A module whose gradient is doubled if an executor calls it."""

    def forward(self, x, labels):
        output, loss = super().forward(x, labels)
        return output, loss + (loss - loss.detach() if poptorch.isRunningOnIpu() else 0)


class Words(Net):
    """A module whose inputs are words instead of numbers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x, labels):
        return super().forward(self.table((x.abs() * 2).long().clamp(max=6)).mean(1), labels)


class Cube(torch.autograd.Function):
    """An operator of the program's own."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 3 * x**2 * gradient


class ByParameter(torch.optim.Optimizer):
    """An optimizer that calls `update` with each parameter and its two moments."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                first = state["first"] = 0.9 * state.get("first", 0) + 0.1 * p.grad
                second = state["second"] = 0.999 * state.get("second", 0) + 0.001 * p.grad**2
                self.update(p, first, second, group["lr"], state["step"])


def plain_lamb(bias_correction=True):
    """Return an optimizer class that computes LAMB as PopTorch's `step` does (MIT)."""

    class Lamb(ByParameter):
        def update(self, p, first, second, lr, step):
            corrections = [1 - beta**step if bias_correction else 1 for beta in (0.9, 0.999)]
            change = first / corrections[0] / (second.sqrt() / corrections[1] ** 0.5 + 1e-6) + 0.01 * p
            p.sub_(lr * p.norm().clamp(max=2.0) / change.norm() * change)

    return Lamb


class PlainAdamW(ByParameter):
    """AdamW of PopTorch's BERT example, with uncorrected moments."""

    def update(self, p, first, second, lr, step):
        p.mul_(1 - lr * 0.01).sub_(lr * first / (second.sqrt() + 1e-6))
