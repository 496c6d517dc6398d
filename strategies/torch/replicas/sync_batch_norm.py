"""`torch.nn.SyncBatchNorm` over all replicas, which meet in the layer and add their statistics."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from collectives import CollectiveTimeoutError
from collectives.reduction import Reduction
from strategies.errors import StrategyError
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.running.driver import AbandonedError
from strategies.torch.replicas.generators import lent_baton
from strategies.torch.tensors import ThreadValue
from strategies.typing import Function, Tree

_FORWARD = "forward"
_plainly = torch.nn.modules.batchnorm._BatchNorm.forward

_entered = ThreadValue["tuple[SyncLayers, int, int | None] | None"](None)  # with the replica and the micro-batch
_kept: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[SyncLayers]] = weakref.WeakKeyDictionary()
_as_pytorch_has_it = torch.nn.SyncBatchNorm.forward

AddRows = Callable[[str, torch.Tensor], torch.Tensor]
"""(description, row of float64) -> the sum of the rows of all replicas."""


class SyncLayers:
    """The layers of a module in which its replicas meet: they wait for each other, and add their statistics.

    A layer computes for the replica that the thread has entered. In other threads it computes for the last local
    replica of its module, as long as this object exists. One case is a checkpoint in the program's own loop, which
    recomputes in the backward pass.

    All local replicas must have begun, so each has a thread. A replica that waits lets another one compute. An error of
    one replica ends the meetings of all, until `begin`.

    Args:
        module: The module.
        replicas: The replicas of all instances. The timeout of their communicator also limits a replica's wait for
            other local ones.
        meets: Whether replicas meet. If not, as in an evaluation, such a layer in training mode is refused.
        is_busy: Whether other collectives, or several of these sums, may run at the same time. Then sums are named
            collectives, which take longer. If instances ask for different named sums, only the timeout ends them.
        is_on_host: Whether replicas compute on the host.

    Attributes:
        replicas: The global indices of the local replicas.
        is_alone: Whether there is one replica.
        meets: Whether replicas meet.
    """

    def __init__(
        self, module: torch.nn.Module, replicas: Replicas, meets: bool, is_busy: bool = False, is_on_host: bool = True
    ) -> None:
        self._module = weakref.ref(module)  # its layers are the keys of `_kept`
        self.replicas, self._communicator = replicas.local_replicas, replicas.communicator
        self.is_alone, self.meets = replicas.num_replicas_in_sync == 1, meets
        self._is_busy, self._is_on_host = is_busy, is_on_host
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._repeated: Iterator[np.ndarray] | None = None
        self.begin()
        _install()
        for layer in sync_layers_of(module).values() if meets else ():
            _kept[layer] = weakref.ref(self)

    def begin(self, is_repeated: bool = False) -> None:
        """Begin a step of all local replicas, whose first one will compute again if `is_repeated`."""
        self._waiting: dict[int, tuple[str, np.ndarray]] = {}  # the meeting and the array of each replica that is there
        self._total: Future[np.ndarray] = Future()  # the sum for which they wait
        self._gone: set[int] = set()  # the replicas whose passes have ended
        self._failure: BaseException | None = None
        self._of_first: list[np.ndarray] | None = [] if is_repeated else None  # the sums of the first local replica

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Let the first local replica compute again, with the sums that it got before."""
        self._repeated = iter(self._of_first or ())
        try:
            yield
        finally:
            self._repeated = None

    @contextmanager
    def attended_by(self, replica: int) -> Iterator[None]:
        """Let this thread compute a replica's passes. If they fail, and afterwards, no replica waits for this one."""
        if not self.meets:
            yield
            return
        with nullcontext() if self._is_on_host else torch.autograd.set_multithreading_enabled(False):
            try:  # autograd has one thread for all backward passes on a device, and it must not wait
                yield
            except BaseException as error:
                with self._lock:
                    if self._failure is None:
                        self._fail(AbandonedError(f"replica {replica} has failed: {error}"))
                raise
            finally:
                with self._lock:
                    self._gone.add(replica)
                    self._arrays_of_all()

    def entered(self, replica: int, micro_batch: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which this thread computes for a replica, in a step for one of its micro-batches."""
        return _entered.using((self, replica, micro_batch))

    def sum(
        self, layer: torch.nn.Module, what: str, replica: int, micro_batch: int | None, row: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the rows, float64, of all replicas in one meeting of a layer.

        Raises:
            StrategyError: If replicas do not meet. If another local replica ended its passes without this meeting, or
                waits at another one.
            AbandonedError: If another local replica has failed.
            CollectiveError: If the collective fails, or a local replica has not come before the timeout.
        """
        of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
        name = f"SyncBatchNorm {self._name_of(layer)!r}"
        if not self.meets:
            raise StrategyError(
                f"{name} is in training mode, but replicas do not compute together here; leave it in evaluation mode "
                "in an evaluation, and make it a part of the module in a training"
            )
        total = self._sum(f"{name}, {what}{of}", replica, row.cpu().numpy())
        return torch.from_numpy(np.array(total)).to(row.device)

    def _name_of(self, layer: torch.nn.Module) -> str:
        module = self._module()
        if id(layer) not in self._names and module is not None:
            self._names = {id(one): name for name, one in module.named_modules()}
        return self._names.get(id(layer), type(layer).__name__)

    def _sum(self, name: str, replica: int, array: np.ndarray) -> np.ndarray:
        """Return the sum of all replicas' arrays in the meeting of this name. The result must not be changed."""
        if self._repeated is not None:
            if (known := next(self._repeated, None)) is None:
                raise StrategyError(f"replica {replica} comes to {name} more often than before")
            return known
        with self._lock:
            if self._failure is not None:
                raise AbandonedError(f"replica {replica} is given up in {name}: {self._failure}") from self._failure
            self._waiting[replica] = name, array
            future = self._total
            arrays = self._arrays_of_all()
        timeout_s = self._communicator.limits.timeout_s
        with lent_baton():
            if arrays:
                self._add(name, arrays, future)
            elif not wait([future], timeout_s).done:
                with self._lock:
                    missing = [str(one) for one in self.replicas if one not in self._waiting]
                    if replica in self._waiting and missing:
                        raise CollectiveTimeoutError(
                            f"replica {replica} has waited for replica {', '.join(missing)} of this instance in "
                            f"{name}: gave up after timeout_s = {timeout_s:g}"
                        )
            total = future.result()  # if all local replicas are there, the collective has a limit of its own
        if self._of_first is not None and replica == self.replicas[0]:
            self._of_first.append(total)
        return total

    def _add(self, name: str, arrays: Sequence[np.ndarray], future: Future[np.ndarray]) -> None:
        """Add the arrays of the local replicas and of those of other instances, in the order of the tree."""
        out, communicator = np.empty_like(arrays[0]), self._communicator
        try:
            if communicator.size == 1:
                Reduction("sum", out.dtype).reduce(arrays, out, len(arrays))
            elif self._is_busy:
                out = communicator.start_ordered_all_reduce(arrays, out, name=name).wait()
            else:
                out = communicator.ordered_all_reduce(arrays, name=name)
        except BaseException as error:  # raised where the replicas wait
            future.set_exception(error)
        else:
            future.set_result(out)

    # ---- missing replicas

    def _arrays_of_all(self) -> list[np.ndarray]:
        """Return the arrays if all local replicas are in one meeting. If they will never be, end it. Lock held."""
        waiting, gone = self._waiting, self._gone
        if not waiting or len(waiting) + len(gone) < len(self.replicas):
            return []
        if not gone and len({name for name, _ in waiting.values()}) == 1:
            self._waiting, self._total = {}, Future()
            return [waiting[replica][1] for replica in self.replicas]
        places = [f"replica {replica} waits in {name}" for replica, (name, _) in sorted(waiting.items())]
        places += [f"replica {replica} has ended its passes" for replica in sorted(gone)]
        self._fail(
            StrategyError(
                f"replicas wait for each other in different layers: {', '.join(places)}; every replica must call such "
                "layers equally often, and in the same order: call the layer in every replica, even without rows"
            )
        )
        return []

    def _fail(self, error: BaseException) -> None:
        """End the open meeting with an error. The lock is held."""
        self._failure = error
        self._total.set_exception(error)
        self._waiting, self._total = {}, Future()


def sync_layers_of(module: torch.nn.Module) -> dict[str, torch.nn.SyncBatchNorm]:
    """Return the layers of a module that need sums over replicas, by name.

    Raises:
        StrategyError: If such a layer has a `process_group`, or is inside a traced or scripted module.
    """
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            if layer.process_group is not None:
                raise StrategyError(
                    f"SyncBatchNorm {name!r} has a process_group, but replicas are no ranks of torch.distributed; "
                    "leave process_group out: statistics are over all replicas"
                )
            found[name] = layer
        elif getattr(layer, "original_name", None) == torch.nn.SyncBatchNorm.__name__:
            raise StrategyError(
                f"SyncBatchNorm {name!r} is inside a traced or scripted module, which cannot wait for other "
                "replicas; give the module as it was before torch.jit"
            )
    return found


def check_no_sync_layers(module: torch.nn.Module) -> None:
    """Raise for a module with `SyncBatchNorm` in a loop whose instances may have different numbers of batches."""
    if layers := sync_layers_of(module):
        raise StrategyError(
            f"SyncBatchNorm {next(iter(layers))!r} needs rows of all replicas in each forward pass, but with join some "
            "have none; give all instances equally many batches, as DistributedSampler does"
        )


def _install() -> None:
    """Replace the forward method of PyTorch's SyncBatchNorm by `_forward`, which torch.compile skips."""
    can_compile = "torch._dynamo" in sys.modules  # importing torch._dynamo takes a second
    setattr(torch.nn.SyncBatchNorm, _FORWARD, torch.compiler.disable(_forward) if can_compile else _forward)


def _forward(layer: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:  # `input` is PyTorch's name
    now = _entered.now
    if now is None and (kept := _kept.get(layer, lambda: None)()) is not None:
        now = kept, kept.replicas[-1], None
    if now is None:
        return _as_pytorch_has_it(layer, input)
    layers, replica, micro_batch = now
    if layers.is_alone or not layer.training:
        return _plainly(layer, input)
    return normalised(layer, input, lambda what, row: layers.sum(layer, what, replica, micro_batch, row))


def normalised(layer: torch.nn.SyncBatchNorm, x: torch.Tensor, add: AddRows) -> torch.Tensor:
    """Normalise a replica's values for a layer in training mode, and update its running statistics.

    Outputs, gradients and running statistics are those of a BatchNorm (Ioffe & Szegedy, 2015) on the values of all
    replicas together. Statistics are computed in float32 (for float64 values in float64) and added in float64. A
    replica's weight is its number of values, which may be 0.

    Args:
        layer: The replica's layer.
        x: Values of shape [N, C, ...].
        add: Sums over replicas. All replicas call it in the same order.

    Raises:
        ValueError: If the layer does not take this shape, or all replicas together have fewer than two values.
    """
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    with torch.no_grad():
        of_all = _statistics(x.detach(), add)
        if layer.track_running_stats:
            _track(layer, of_all.mean, of_all.variance * (of_all.count / (of_all.count - 1)))
    normalise: Function = _Normalise.apply
    result: torch.Tensor = normalise(x, layer.weight, layer.bias, of_all, layer.eps, partial(add, "backward"))
    return result


@dataclass(frozen=True)
class _Statistics:
    """Mean and variance, float64 [C], of all replicas' values in each channel, and the number of values."""

    mean: torch.Tensor
    variance: torch.Tensor
    count: float


def _statistics(x: torch.Tensor, add: AddRows) -> _Statistics:
    channels = x.shape[1]
    own = x.numel() // channels
    mean = variance = torch.zeros(channels, dtype=torch.float64, device=x.device)
    if own:
        zeros = torch.zeros(channels, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        found = torch.batch_norm_update_stats(x, zeros, torch.ones_like(zeros), 0.0)
        mean, variance = (one.double() for one in found)
    number = torch.tensor([own], dtype=torch.float64, device=x.device)
    total = add("forward", torch.cat([mean * own, (variance + mean.square()) * own, number]))
    count = float(total[-1])
    if count < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {count:g} of all replicas together, input size "
            f"{list(x.shape)}"
        )
    of_all, squares = total[:channels] / count, total[channels:-1] / count
    if x.dtype != torch.float64:
        return _Statistics(of_all, (squares - of_all.square()).clamp(min=0), count)
    deviations = (variance + (mean - of_all).square()) * own  # sums of squares would lose float64's digits
    return _Statistics(of_all, add("forward, variances", deviations) / count, count)


def _track(layer: torch.nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    factor = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    for running, now in ((layer.running_mean, mean), (layer.running_var, variance)):
        if running is not None:
            running.copy_(running.double().lerp(now, factor))


class _Normalise(torch.autograd.Function):
    """Batch normalisation with the statistics of all replicas."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *others: Tree
    ) -> torch.Tensor:
        """Normalise.

        Args:
            ctx: PyTorch's context.
            x: The values.
            weight: The weight of the layer.
            bias: Its bias.
            others: `_Statistics`, the layer's `eps`, and (row) -> the sum of the rows of all replicas.
        """
        of_all, ctx.eps, ctx.add = others
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, of_all.mean, of_all.variance)
        ctx.count, ctx.bias_dtype = of_all.count, None if bias is None else bias.dtype
        given = of_all.mean, of_all.variance, weight, bias
        mean, variance, scale, offset = (None if one is None else one.to(wide) for one in given)
        return F.batch_norm(x, mean, variance, scale, offset, False, 0.0, ctx.eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        wide, channels = torch.promote_types(x.dtype, torch.float32), x.shape[1]
        deviation = (variance + ctx.eps).rsqrt()
        mean, inverse = mean.to(wide), deviation.to(wide)
        by_weight = by_bias = torch.zeros(channels, dtype=wide, device=x.device)
        if x.numel():
            only_sums = [False, True, True]
            _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, torch.ones_like(mean), None, None, mean, inverse, True, ctx.eps, only_sums
            )
        gradient = None
        if ctx.needs_input_grad[0]:
            total = ctx.add(torch.cat([by_weight, by_bias]).double()) / ctx.count
            shape = [1, channels] + [1] * (x.dim() - 2)
            along, constant = ((one.to(wide)).view(shape) for one in (total[:channels] * deviation, total[channels:]))
            scale = inverse if weight is None else inverse * weight.to(wide)
            gradient = (x - mean.view(shape)).mul_(along).add_(constant)
            gradient = torch.sub(dy, gradient, out=gradient).mul_(scale.view(shape)).to(x.dtype)
        to_weight = by_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        to_bias = by_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gradient, to_weight, to_bias, None, None, None
