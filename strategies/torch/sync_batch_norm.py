"""`torch.nn.SyncBatchNorm` over all replicas: statistics of the rows that all of them have, forward and backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from strategies.errors import StrategyError
from strategies.replicas.replicas import Replicas
from strategies.torch.meetings import ReplicaMeetings, adding_over
from strategies.torch.normalisation import normalised
from strategies.torch.threads import ThreadValue

_FORWARD = "forward"
_plainly = torch.nn.modules.batchnorm._BatchNorm.forward


class Seat:
    """One replica's place among all replicas, as its layers know it.

    A layer computes for the replica whose seat the thread has taken. In other threads, as where a checkpoint computes
    again in the backward pass of a loop, it computes for the replica of its module, as long as that seat exists.

    Args:
        meetings: where replicas add up; None where they do not, as in an evaluation.
    """

    def __init__(self, replica: int, replicas: int, module: torch.nn.Module, meetings: ReplicaMeetings | None) -> None:
        self.is_alone = replicas == 1
        self._replica = replica
        self._module = weakref.ref(module)  # whose layers are the keys of `_kept`
        self._meetings = meetings
        self._names: dict[int, str] = {}
        _install()
        for layer in sync_layers_of(module).values():
            _kept[layer] = weakref.ref(self)

    @contextmanager
    def taken(self, micro_batch: int | None = None) -> Iterator[None]:
        """Let the calling thread compute for the replica."""
        with _seat.being(self), _micro_batch.being(micro_batch):
            yield

    @contextmanager
    def computing(self, micro_batch: int) -> Iterator[None]:
        """Let the calling thread make the passes of a micro-batch; if they fail, nobody waits for the replica."""
        with self.taken(micro_batch):
            try:
                yield
            except BaseException as error:
                if self._meetings is not None:
                    self._meetings.fail(self._replica, error)
                raise

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Let the calling thread make the passes of a step for the replica."""
        if self._meetings is None:
            yield
            return
        with self._meetings.attended_by(self._replica):
            yield

    def sum(self, layer: torch.nn.Module, what: str, micro_batch: int | None, row: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows, float64, of all replicas."""
        of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
        name = f"SyncBatchNorm {self._name_of(layer)!r}, {what}{of}"
        if self._meetings is None:
            raise StrategyError(
                f"SyncBatchNorm {self._name_of(layer)!r} is in training mode where replicas do not compute together; "
                "leave it in evaluation mode in an evaluation, and make it a part of the module in a training"
            )
        array = row.cpu().numpy()
        return torch.from_numpy(np.array(self._meetings.sum(name, self._replica, array))).to(row.device)

    def _name_of(self, layer: torch.nn.Module) -> str:
        module = self._module()
        if id(layer) not in self._names and module is not None:
            self._names = {id(one): name for name, one in module.named_modules()}
        return self._names.get(id(layer), type(layer).__name__)


_seat = ThreadValue[Seat | None](None)
_micro_batch = ThreadValue[int | None](None)
_kept: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Seat]] = weakref.WeakKeyDictionary()
_as_pytorch_has_it = torch.nn.SyncBatchNorm.forward


def sync_layers_of(module: torch.nn.Module) -> dict[str, torch.nn.SyncBatchNorm]:
    """Return the layers of a module that need sums over replicas, by their names.

    Raises:
        StrategyError: if one of them cannot have them.
    """
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            if layer.process_group is not None:
                raise StrategyError(
                    f"SyncBatchNorm {name!r} has a process_group, and replicas are no ranks of torch.distributed; "
                    "leave process_group out: statistics are those of all replicas"
                )
            found[name] = layer
        elif getattr(layer, "original_name", None) == torch.nn.SyncBatchNorm.__name__:
            raise StrategyError(
                f"SyncBatchNorm {name!r} is inside of a traced or scripted module, which cannot wait for other "
                "replicas; give the module as it was before torch.jit"
            )
    return found


def seat_in_loop(module: torch.nn.Module, replicas: Replicas, is_busy: bool) -> Seat:
    """Make the seat of this instance's one replica in a loop of the program's own."""
    communicator = replicas.communicator
    meetings = ReplicaMeetings(
        replicas.local_replicas, adding_over(communicator, is_busy), None, communicator.limits.timeout_s
    )
    return Seat(replicas.local_replicas.start, replicas.num_replicas_in_sync, module, meetings)


def refuse_to_join(module: torch.nn.Module) -> None:
    """Refuse `SyncBatchNorm` in a loop whose instances may have different numbers of batches."""
    if layers := sync_layers_of(module):
        raise StrategyError(
            f"SyncBatchNorm {next(iter(layers))!r} needs rows of all replicas in each forward pass, and with join some "
            "have none; give all instances equally many batches, as DistributedSampler does"
        )


def _nobody() -> None:
    return None


def _install() -> None:
    """Have PyTorch's layers ask which replica computes, outside of what torch.compile makes of a module."""
    can_compile = "torch._dynamo" in sys.modules  # to load it takes a second
    setattr(torch.nn.SyncBatchNorm, _FORWARD, torch.compiler.disable(_forward) if can_compile else _forward)


def _forward(layer: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:  # PyTorch's name
    seat = _seat.now or _kept.get(layer, _nobody)()
    if seat is None:
        return _as_pytorch_has_it(layer, input)
    if seat.is_alone or not layer.training:
        return _plainly(layer, input)
    micro_batch = _micro_batch.now
    return normalised(layer, input, lambda what, row: seat.sum(layer, what, micro_batch, row))
