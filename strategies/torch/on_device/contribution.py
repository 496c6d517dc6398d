"""One local replica's part of the mean gradients, on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from strategies.errors import StrategyError
from strategies.torch.gradient_exchange import TorchGradientPlan
from strategies.torch.on_device.arithmetic import torch_dtype
from strategies.torch.on_device.flat_gradients import flat_buffers
from strategies.torch.replicas.groups import GroupRow
from strategies.torch.replica_memory import put

Told: TypeAlias = float | torch.Tensor
"""A number on the host, or a tensor of no axes on the device."""


@dataclass(frozen=True)
class ToldByReplica:
    """Facts about a replica's step besides its gradients.

    Attributes:
        notice: Whether the replica's instance was given a notice.
        settings: The hash of the settings, see `StepSettings.word`.
        has_gradient: For each trained parameter, whether it has a gradient.
        has_changed: For each buffer, whether the step has changed it: 0 or 1, and more if its shape has changed.
        weight: The mean weight of the losses; None if they have no weights.
    """

    notice: bool
    settings: int
    has_gradient: Sequence[bool]
    has_changed: Sequence[Told]
    weight: float | None = None


class DeviceContribution:
    """A replica's gradients as flat tensors, which the exchange may overwrite. One object serves all steps.

    A large gradient is passed on as autograd has made it; small gradients are copied into the buffer of their dtype.

    Args:
        plan: The plan of the gradients, with one bucket, not quantised.
        rows: For parameters with one row per group of replicas, this replica's row, by the parameter's number.
        device: The device of the gradients.
        is_alone: Whether there is one replica. Its gradients are the means, and stay as they are, in buffers of their
            own.
        tells_all: Whether the whole tail travels behind the gradients. If not, only the metrics do.
        checks: Whether to record which gradients are finite.

    Attributes:
        told: The facts about the step.
    """

    def __init__(
        self,
        plan: TorchGradientPlan,
        rows: Mapping[int, GroupRow],
        device: torch.device,
        is_alone: bool,
        tells_all: bool,
        checks: bool,
    ) -> None:
        self._plan, self._rows, self._device = plan, rows, device
        self._is_alone, self._tells_all, self._checks = is_alone, tells_all, checks
        self._dtypes = [torch_dtype(plan.transfer.dtype_of(parameter.dtype)) for parameter in plan.parameters]
        self._buffers: list[torch.Tensor | None] = []
        self._are_finite: torch.Tensor | None = None
        self.told = ToldByReplica(False, 0, (), ())

    def take_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of all parameters, in their order. The exchange may change them from here on.

        Raises:
            StrategyError: If a gradient is sparse.
        """
        with torch.no_grad():
            found = [self._whole(number, gradient) for number, gradient in enumerate(gradients)]
            if self._checks:
                self._are_finite = are_finite(found, self._device)
            self._apart(found)
            if self._is_alone:
                pairs = zip(found, self._dtypes, strict=True)
                self._buffers = [one if one is None or one.dtype is dtype else one.to(dtype) for one, dtype in pairs]
            else:
                self._buffers = [*flat_buffers(self._plan, found, self._device)]

    def _whole(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient in the shape of the whole parameter: a row of it is padded with zeros."""
        if gradient is None:
            return None
        name = self._plan.parameters[number].name
        if gradient.layout is not torch.strided:
            raise StrategyError(
                f"the gradient of {name} is sparse, but only dense ones can be averaged; construct its layer with "
                "sparse=False"
            )
        row = self._rows.get(number)
        if row is None:
            return gradient
        whole = torch.zeros(self._plan.parameters[number].shape, dtype=gradient.dtype, device=gradient.device)
        whole[row.number].copy_(gradient * row.gain)  # the other rows stay zero
        return whole

    def _apart(self, gradients: list[torch.Tensor | None]) -> None:
        """Give each gradient memory of its own, because autograd may give the same tensor to two parameters."""
        addresses = [one.data_ptr() for one in gradients if one is not None and one.numel()]
        if len(set(addresses)) == len(addresses):
            return
        seen: set[int] = set()
        for number, gradient in enumerate(gradients):
            if gradient is None or not gradient.numel():
                continue
            if gradient.data_ptr() in seen:
                gradients[number] = gradient.clone()
            seen.add(gradient.data_ptr())

    def set_tail(
        self,
        metrics: Sequence[Told],
        notice: bool,
        settings: int,
        has_gradient: Sequence[bool],
        has_changed: Sequence[Told],
        weight: float | None = None,
    ) -> None:
        """Write the values that travel behind the gradients; see `Tail`.

        Args:
            metrics: The metrics, float64 tensors of no axes on the device.
            notice: Whether the instance was given a notice.
            settings: The hash of the settings.
            has_gradient: For each trained parameter, whether it has a gradient.
            has_changed: For each buffer, whether the step has changed it.
            weight: The mean weight of the losses, which is also the last metric; None if they have no weights.
        """
        self.told = ToldByReplica(notice, settings, tuple(has_gradient), tuple(has_changed), weight)
        values = torch.stack([one for one in metrics if isinstance(one, torch.Tensor)]).float()
        if self._is_alone:
            self._buffers.append(values)
            return
        tail = self._buffers[0]
        assert tail is not None
        tail = tail[tail.numel() - self._plan.tail :]
        tail[: len(metrics)].copy_(values)
        if self._tells_all:
            self._tell_all(tail[len(metrics) :])

    def _tell_all(self, tail: torch.Tensor) -> None:
        told = self.told
        changed = [0.0 if isinstance(one, torch.Tensor) else one for one in told.has_changed]
        known = [told.notice, told.settings, told.settings**2, *told.has_gradient, *changed]
        tail.copy_(put(torch.tensor(known, dtype=torch.float32), self._device))
        first = len(known) - len(changed)
        for number, one in enumerate(told.has_changed):
            if isinstance(one, torch.Tensor):
                tail[first + number].copy_(one)

    def arrays(self, bucket: int) -> list[torch.Tensor | None]:
        """Hand over the buffers of the only bucket.

        If there is one replica, they are its gradients (None for a parameter without one), and the metrics.
        """
        found, self._buffers = self._buffers, []
        return found

    def is_finite(self, number: int) -> bool:
        """Return whether a gradient that was taken is finite. Waits for the device."""
        return self._are_finite is None or bool(self._are_finite[number])

    def give_back(self) -> None:
        """Release the gradients of the step."""
        self._buffers = []


def are_finite(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return booleans on the device: whether all of each tensor is finite; True for None."""
    places = [number for number, one in enumerate(tensors) if one is not None and one.numel()]
    if len(places) < len(tensors):
        found = torch.ones(len(tensors), dtype=torch.bool, device=device)
        for number in places:
            one = tensors[number]
            assert one is not None
            found[number] = one.isfinite().all()
        return found
    largest = torch._foreach_norm([one for one in tensors if one is not None], math.inf)
    return torch.stack(largest).isfinite()
