"""The interface of the exchanges of gradients: on the host, or on the device of the replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from strategies.core.engine import Buffers
from strategies.exchange.means import Bucket
from strategies.torch.exchange.plan import Tail, Told, TorchGradientPlan


class GradientExchange(ABC):
    """An exchange of gradients for one plan and the present instances. The order of calls is the same on all instances.

    A `Trainer` takes the gradients of each local replica, and tells its numbers. Then it reduces each bucket, and asks
    for the weight, the means and the tail. A loop of the program takes gradients, calls `finish`, then `give`. If the
    tail shows that the means cannot be used, no instance calls `give`. If a call raises, the step has no means.

    Attributes:
        plan: The plan of the gradients.
        names: The names of the metrics in the tail.
        buckets: The buckets, with the memory of the exchange.
    """

    buckets: Sequence[Bucket]

    def __init__(self, plan: TorchGradientPlan, names: tuple[str, ...]) -> None:
        self.plan, self.names = plan, names

    # ---- the gradients of local replicas

    @abstractmethod
    def take(self, number: int, gradient: torch.Tensor | None, place: int = 0) -> None:
        """Take one gradient while the backward pass runs, None for zeros. The caller must not change it any more.

        Raises:
            StrategyError: If the gradient is sparse.
        """

    @abstractmethod
    def take_all(self, gradients: Sequence[torch.Tensor | None], place: int = 0) -> None:
        """Take all gradients of a local replica, in the order of the parameters, None for zeros.

        Args:
            gradients: The gradients. The caller must not change them any more.
            place: The place of the replica among the local replicas.

        Raises:
            StrategyError: If a gradient is sparse.
        """

    @abstractmethod
    def tell(self, told: Told, place: int = 0) -> None:
        """Set the numbers behind a replica's gradients, after all of its gradients were taken."""

    @abstractmethod
    def buffers(self, bucket: int) -> Buffers:
        """Return the buffers of the local replicas for a bucket."""

    @abstractmethod
    def is_finite(self, place: int, number: int) -> bool:
        """Return whether a gradient of a local replica is finite. Valid until the gradients are released."""

    @abstractmethod
    def give_back(self) -> None:
        """Release the gradients of the step."""

    @abstractmethod
    def let_go(self) -> None:
        """Drop the means of the last step."""

    # ---- means

    @abstractmethod
    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Compute the means of a bucket from the buffers of the local replicas. Collective."""

    @property
    @abstractmethod
    def weight(self) -> float | None:
        """The mean weight of the losses; None if they have no weights. May wait for the device."""

    @abstractmethod
    def means(self, *divisors: float) -> Sequence[torch.Tensor | None]:
        """Return the mean gradients, divided, in the dtypes of their parameters; valid until the next step.

        If means are sharded, they are this instance's shards.

        Args:
            divisors: Numbers by which to divide, one after another: the loss scale and the mean weight of losses.
        """

    @abstractmethod
    def arrived(self, means: Sequence[torch.Tensor | None], checks: bool) -> tuple[Tail, np.ndarray]:
        """Return the tail, and for each mean whether it is not finite. Without `checks`, all means count as finite."""

    # ---- in a loop of the program

    @abstractmethod
    def reduce_early(self, bucket: int) -> None:
        """Exchange a bucket other than the last one, whose gradients were taken. Collective."""

    @abstractmethod
    def finish(self, told: Sequence[Told]) -> Tail:
        """Exchange the last bucket and the numbers of each local replica, and return their means. Collective."""

    @abstractmethod
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace each gradient of the first local replica by its mean, in place; None leaves one out. Collective."""
