"""Layers, and modules around layers, of typical PyTorch programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from idiom import CLASSES, FEATURES, LENGTH, WORDS, Apply, Idiom, read
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

HEAD = partial(nn.Linear, 6, CLASSES)


def layered(*layers: nn.Module) -> nn.Module:
    """Put layers between a linear one, to 6 features, and the head."""
    return nn.Sequential(nn.Linear(FEATURES, 6), *layers, HEAD())


def table(**options: Any) -> nn.Module:
    """Make a module that averages rows of a table."""
    return Apply(lambda self, words: self.head(self.table(words).mean(1)), table=nn.Embedding(WORDS, 6, **options),
                 head=HEAD())  # fmt: skip


def recurrent(kind: Any) -> nn.Module:
    """Make two recurrent layers with dropout between them."""
    return Apply(
        lambda self, x: self.head(self.rnn(x.view(-1, 4, 2))[0][:, -1]),
        rnn=kind(2, 6, 2, batch_first=True, dropout=0.4),
        head=HEAD(),
    )


class Attends(nn.Module):
    """Self-attention with dropout and a mask in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 6), HEAD()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1).bool(), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found = self.table(words)
        return self.head(self.attention(found, found, found, attn_mask=self.mask)[0].mean(1))


class Tied(nn.Module):
    """A module whose table and last layer share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False)
        self.last.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.last(self.table(words).mean(1))[:, :CLASSES]


class Counts(nn.Module):
    """A module whose forward pass depends on its own count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.calls += 1
        return self.last(x) / self.calls


class Teacher(nn.Module):
    """A module with a moving mean of its own weights in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", self.last.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.mean.lerp_(self.last.weight.detach(), 0.1)
        return self.last(x) - F.linear(x, self.mean)


class Momentum(nn.Module):
    """A momentum encoder (MoCo; He et al., 2020), whose forward pass writes frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query, alpha=0.1)
            target = self.key(x)
        return self.query(x) + target


class Doubles(torch.autograd.Function):
    """A function that doubles its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return twice the input."""
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input."""
        return gradient * (ctx.saved_tensors[0] > 0)


class Unlike(nn.Linear):
    """A layer that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError("it holds a socket")


def pruned() -> nn.Module:
    module = layered(nn.Tanh())
    prune.l1_unstructured(module[0], "weight", 0.4)
    return module


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Linear(6, CLASSES))
    module.eval()(torch.zeros(2, FEATURES))
    return module.train()


def removed() -> nn.Module:
    module = layered(nn.Tanh())
    module[0].register_parameter("scale", None)
    module[0].register_parameter("bias", None)
    return module


def sphered() -> nn.Module:
    """Make a layer with a parametrization of the program's own."""
    module = layered(nn.Tanh())
    parametrize.register_parametrization(module[0], "weight", Apply(lambda self, weight: F.normalize(weight, dim=1)))
    return module


def frozen_integers() -> nn.Module:
    """Make a layer whose weights are integers, which nobody trains."""
    weights = nn.Parameter(torch.randint(-8, 8, (6, FEATURES), dtype=torch.int8), requires_grad=False)
    return Apply(lambda self, x: self.head(F.linear(x, self.weights / 8)), weights=weights, head=HEAD())


def half_frozen() -> nn.Module:
    module = layered(nn.Tanh())
    module[0].requires_grad_(False)
    return module


def quantised() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(FEATURES, 6), fake, HEAD())


def compiled(**options: Any) -> nn.Module:
    return torch.compile(layered(nn.Tanh()), backend="eager", **options)


def compiled_in_place() -> nn.Module:
    module = layered(nn.Tanh())
    module.compile(backend="eager")
    return module


def unsaved() -> nn.Module:
    """Make a module with a buffer that is not saved, and one that is None."""
    module = Apply(lambda self, x: self.last(x * self.scale), last=nn.Linear(FEATURES, CLASSES))
    module.register_buffer("scale", torch.full((FEATURES,), 0.5), persistent=False)
    module.register_buffer("none", None)
    return module


def listed() -> nn.Module:
    return Apply(
        lambda self, x: self.heads["left"](sum(torch.tanh(x @ one) for one in self.weights)) * self.gains["left"],
        weights=nn.ParameterList([nn.Parameter(torch.randn(FEATURES, 6) / 3) for _ in range(3)]),
        heads=nn.ModuleDict({"left": HEAD(), "right": HEAD()}),
        gains=nn.ParameterDict({"left": nn.Parameter(torch.ones(()))}),
    )


def checkpointed(**options: Any) -> nn.Module:
    return Apply(
        lambda self, x: self.last(checkpoint(self.middle, torch.tanh(self.first(x)), **options)),
        first=nn.Linear(FEATURES, 6),
        middle=nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()),
        last=HEAD(),
    )


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers, nn.Flatten(), nn.LazyLinear(CLASSES))


def of_images(*layers: nn.Module) -> nn.Module:
    module = images(*layers)
    module.eval()(torch.zeros(2, FEATURES))
    return module.train()


LAYERS = [
    Idiom("a linear layer", lambda: nn.Linear(FEATURES, CLASSES)),
    Idiom("dropout", lambda: layered(nn.Dropout(0.5))),
    Idiom("dropout of channels", lambda: of_images(nn.Conv2d(2, 3, 2, padding=1), nn.Dropout2d(0.4))),
    Idiom("alpha dropout", lambda: layered(nn.SELU(), nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.2))),
    Idiom("a random leaky relu", lambda: layered(nn.RReLU())),
    Idiom("convolutions", lambda: of_images(nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2, 1))),
    Idiom("transposed convolutions", lambda: of_images(nn.ConvTranspose2d(2, 3, 2), nn.AvgPool2d(2, 1))),
    Idiom("a convolution along one axis", lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 2),
                                                                nn.Flatten(), nn.Linear(9, CLASSES))),
    Idiom("channels last", lambda: of_images(nn.Conv2d(2, 4, 2, padding=1)).to(memory_format=torch.channels_last)),
    Idiom("batch norm", lambda: layered(nn.BatchNorm1d(6), nn.Tanh())),
    Idiom("batch norm with a cumulative mean", lambda: layered(nn.BatchNorm1d(6, momentum=None))),
    Idiom("batch norm without statistics", lambda: layered(nn.BatchNorm1d(6, track_running_stats=False))),
    Idiom("synchronised batch norm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(layered(nn.BatchNorm1d(6)))),
    Idiom("other norms", lambda: layered(nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6))),
    Idiom("instance norm", lambda: of_images(nn.InstanceNorm2d(2, affine=True, track_running_stats=True))),
    Idiom("an LSTM", lambda: recurrent(nn.LSTM)),
    Idiom("a GRU", lambda: recurrent(nn.GRU)),
    Idiom("a recurrent cell", lambda: Apply(lambda self, x: self.head(self.cell(x, self.cell(x))),
                                            cell=nn.GRUCell(FEATURES, 6), head=HEAD())),
    Idiom("a transformer", lambda: Apply(lambda self, x: self.head(self.layer(x.view(-1, 4, 2)).flatten(1)),
                                         layer=nn.TransformerEncoderLayer(2, 1, 5, 0.3, batch_first=True),
                                         head=nn.Linear(8, CLASSES))),
    Idiom("attention", Attends, read),
    Idiom("bilinear layers", lambda: Apply(lambda self, x: self.last(x, x), last=nn.Bilinear(FEATURES, FEATURES, 3))),
    Idiom("a table", table, read),
    Idiom("a table with padding", lambda: table(padding_idx=0), read),
    Idiom("a table that counts words", lambda: table(scale_grad_by_freq=True), read),
    Idiom("a table of bounded norm", lambda: table(max_norm=0.5), read,
          refused="was written while a replica computed", refused_from=2),
    Idiom("a table with sparse gradients", lambda: table(sparse=True), read, refused="is sparse, .* sparse=False",
          optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1)),
    Idiom("a bag of rows", lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 6, mode="mean"), HEAD()), read),
    Idiom("complex parameters", lambda: Apply(
        lambda self, x: (x.to(self.gain.dtype) @ self.gain).abs(),
        gain=nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64)))),
    Idiom("double precision", lambda: Apply(lambda self, x: self.last(x.double()).float(),
                                            last=nn.Linear(FEATURES, CLASSES, dtype=torch.float64))),
    Idiom("parameters of 16 bits", lambda: Apply(lambda self, x: self.last(x.bfloat16()).float(),
                                                 last=nn.Linear(FEATURES, CLASSES, dtype=torch.bfloat16))),
    Idiom("fused attention", lambda: Apply(
        lambda self, x: self.head(F.scaled_dot_product_attention(*self.qkv(x).view(-1, 3, 1, 3, 4).unbind(1),
                                                                 dropout_p=0.3).flatten(1)),
        qkv=nn.Linear(FEATURES, 36), head=nn.Linear(12, CLASSES))),
]  # fmt: skip

WRAPPERS = [
    Idiom("weight norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 6)), HEAD())),
    Idiom("spectral norm", lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 6)), HEAD())),
    Idiom("spectral norm, the old one", lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(FEATURES, 6)), HEAD())),
    Idiom("orthogonal weights", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(FEATURES, 6)), HEAD())),
    Idiom("a parametrization of one's own", sphered),
    Idiom("pruned weights", pruned),
    Idiom("tied weights", Tied, read),
    Idiom("lists and dictionaries of parameters", listed),
    Idiom("lazy layers, called once", lazy),
    Idiom("parameters that are None", removed),
    Idiom("buffers that are not saved", unsaved),
    Idiom("frozen layers", half_frozen),
    Idiom("frozen integers", frozen_integers),
    Idiom("unused parameters", lambda: Apply(lambda self, x: self.last(x), last=nn.Linear(FEATURES, CLASSES),
                                             unused=nn.Linear(2, 2))),
    Idiom("a scripted module", lambda: torch.jit.script(layered(nn.Tanh())), tolerance=1e-5),
    Idiom("a traced module", lambda: torch.jit.trace(layered(nn.Tanh()), torch.zeros(2, FEATURES))),
    Idiom("a scripted layer", lambda: layered(torch.jit.script(nn.Linear(6, 6)))),
    Idiom("a compiled module", compiled),
    Idiom("a module that compiles itself", compiled_in_place),
    Idiom("DataParallel", lambda: nn.DataParallel(layered(nn.Tanh()))),
    Idiom("a mean of weights in a buffer", Teacher),
    Idiom("a momentum encoder", Momentum),
    Idiom("a number that forward counts", Counts),
    Idiom("fake quantisation", quantised),
    Idiom("checkpointing", lambda: checkpointed(use_reentrant=False), loops=False),
    Idiom("reentrant checkpointing", lambda: checkpointed(use_reentrant=True), loops=False),
    Idiom("reentrant checkpointing of the first layer", lambda: Apply(
        lambda self, x: self.last(checkpoint(self.first, x.detach().requires_grad_(), use_reentrant=True)),
        first=nn.Linear(FEATURES, 6), last=HEAD()), loops=False),
    Idiom("a function with its own gradient", lambda: Apply(lambda self, x: self.last(Doubles.apply(self.first(x))),
                                                            first=nn.Linear(FEATURES, 6), last=HEAD())),
    Idiom("a module that cannot be copied", lambda: layered(Unlike(6, 6))),
    Idiom("random numbers in forward", lambda: Apply(
        lambda self, x: self.last(x + torch.rand_like(x)) + torch.distributions.Normal(0.0, 1.0).sample((CLASSES,))
        + torch.randperm(CLASSES) + torch.bernoulli(torch.full((CLASSES,), 0.5)),
        last=nn.Linear(FEATURES, CLASSES))),
    Idiom("evaluation mode", lambda: layered(nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()),
    Idiom("a frozen norm", lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6).eval(), HEAD())),
]  # fmt: skip
