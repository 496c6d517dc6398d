"""The exchange of gradients between training loops that drive one replica each, on the device of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from strategies.errors import StrategyError
from strategies.exchange.on_device import DevicePath
from strategies.torch.gradient_exchange import Tail, TorchGradientPlan
from strategies.torch.loop_exchange import LoopExchange, Told
from strategies.torch.on_device.flat_gradients import flat_buffers, gradients_in
from strategies.torch.tensors import real_views


@final
class DeviceLoopExchange(LoopExchange):
    """An exchange that leaves gradients on their device.

    Each step first exchanges the replicas' tails over the communicator, because the host knows them. So instances whose
    loops have diverged detect it there, and no host waits for the device.

    Args:
        plan: The plan of the gradients, with one bucket, without a tail, not quantised.
        communicator: The communicator of all instances.
        path: The path that makes the means, with one replica per instance.
        device: The device of the module.
    """

    def __init__(
        self, plan: TorchGradientPlan, communicator: Communicator, path: DevicePath, device: torch.device
    ) -> None:
        super().__init__(plan)
        self._communicator, self._path, self._device = communicator, path, device

    @override
    def take(self, number: int, gradient: torch.Tensor | None) -> NoReturn:
        """Raise: gradients on a device are not exchanged while the backward pass runs."""
        raise AssertionError("gradients on a device are exchanged at the end of the backward pass")

    @override
    def take_all(self, gradients: Sequence[torch.Tensor | None], place: int = 0) -> None:
        """Check the gradients, which stay where they are.

        Raises:
            StrategyError: If a gradient is sparse or on another device, or a CUDA graph is being captured.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StrategyError(
                "a CUDA graph is captured around the backward pass of a DistributedModel, but its replay would not "
                "exchange gradients with other instances; capture the module inside, or leave the graph out"
            )
        for parameter, gradient in zip(self.plan.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise StrategyError(
                    f"the gradient of {parameter.name} is sparse, but only dense ones can be averaged; construct its "
                    "layer with sparse=False"
                )
            if gradient.device != self._device:
                raise StrategyError(
                    f"the gradient of {parameter.name} is on {gradient.device}, but the module was on {self._device} "
                    "when the DistributedModel was made; move the module before that"
                )

    @override
    def reduce(self, bucket: int) -> NoReturn:
        """Raise: the plan has only one bucket, which `finish` exchanges."""
        raise AssertionError("gradients on a device are exchanged at the end of the backward pass")

    @override
    def finish(self, told: Sequence[Told]) -> Tail:
        [own] = told
        values = np.array(own.values, np.float32)
        mean = self._communicator.ordered_all_reduce([values], op="mean", name=f"{self.plan.title}/tail")
        return Tail.of(mean, len(own.flags), len(self.plan.parameters))

    @override
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        with torch.no_grad():
            gradients = real_views(gradients)
            buffers = [[one] for one in flat_buffers(self.plan, gradients, self._device)]
            dtypes = [buffer.dtype for buffer in self.plan.layouts[0].buffers]
            results = self._path.means(f"{self.plan.title}/0", buffers, dtypes)
            pairs = zip(gradients, gradients_in(self.plan, results), strict=True)
            if given := [(own, mean) for own, mean in pairs if own is not None]:
                into, means = zip(*given, strict=True)
                torch._foreach_copy_(into, means)
