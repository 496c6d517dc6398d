"""The exchange of the gradients of one module in a loop of the program's own, on the device of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import numpy as np
import torch

from collectives import Communicator
from strategies.errors import StrategyError
from strategies.exchange.on_device import DevicePath
from strategies.torch.gradient_exchange import Tail, TorchGradientPlan
from strategies.torch.loop_exchange import LoopExchange, Told
from strategies.torch.on_device.flat_gradients import flat_buffers, gradients_in


@final
class DeviceLoopExchange(LoopExchange):
    """An exchange that leaves gradients on their device.

    What replicas tell each other goes first, over the communicator: it is known on the host. So instances whose loops
    have come apart find out there, and nothing waits for the device.

    Args:
        plan: in one bucket, without a tail, not quantised.
        communicator: connects the instances.
        path: makes the means; one replica per instance.
        device: of the module.
    """

    def __init__(
        self, plan: TorchGradientPlan, communicator: Communicator, path: DevicePath, device: torch.device
    ) -> None:
        super().__init__(plan)
        self._communicator, self._path, self._device = communicator, path, device

    def take(self, number: int, gradient: torch.Tensor | None) -> NoReturn:
        """See `LoopExchange`: nothing travels while backward passes run."""
        raise AssertionError("gradients on a device are exchanged at the end of the backward pass")

    def take_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `LoopExchange`: look at the gradients, which stay where they are.

        Raises:
            StrategyError: if one is sparse or on another device, or a CUDA graph is being captured.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StrategyError(
                "a CUDA graph is captured around the backward pass of a DistributedModel, and would not speak to the "
                "other instances when it is replayed; capture the module inside, or leave the graph out"
            )
        for parameter, gradient in zip(self.plan.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise StrategyError(
                    f"the gradient of {parameter.name} is sparse, and replicas average dense ones; make its layer "
                    "with sparse=False"
                )
            if gradient.device != self._device:
                raise StrategyError(
                    f"the gradient of {parameter.name} is on {gradient.device}, and the module was on {self._device} "
                    "when the DistributedModel was made; move the module before that"
                )

    def reduce(self, bucket: int) -> NoReturn:
        """See `LoopExchange`: there is one bucket."""
        raise AssertionError("gradients on a device are exchanged at the end of the backward pass")

    def finish(self, told: Told) -> Tail:
        """See `LoopExchange`."""
        values = np.array(told.values, np.float32)
        mean = self._communicator.ordered_all_reduce([values], op="mean", name=f"{self.plan.title}/tail")
        return Tail.of(mean, len(told.flags), len(self.plan.parameters))

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `LoopExchange`."""
        with torch.no_grad():
            buffers = [[one] for one in flat_buffers(self.plan, gradients, self._device)]
            dtypes = [buffer.dtype for buffer in self.plan.layouts[0].buffers]
            results = self._path.means(f"{self.plan.title}/0", buffers, dtypes)
            pairs = zip(gradients, gradients_in(self.plan, results), strict=True)
            if given := [(own, mean) for own, mean in pairs if own is not None]:
                into, means = zip(*given, strict=True)
                torch._foreach_copy_(into, means)
