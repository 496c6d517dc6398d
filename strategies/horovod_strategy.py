"""The strategy of instances that Horovod connects."""

from __future__ import annotations

import popdist
from popdist import horovod
from strategies.strategy import Strategy


class IPUHorovodStrategy(Strategy):
    """The replicas of all instances of the job, connected by Horovod; calls `popdist.init` and `horovod.init`.

    Works under poprun, under mpirun and, as one instance, without a launcher. The gradients of an instance's replicas
    are added in their order, and the sums of the instances by Horovod, in the order that MPI chooses: the variables
    are the same to the last bit on all instances, and close to those of `PopDistStrategy` (docs/horovod.md). With
    `variables_on_host`, `Trainer` streams gradients: what the backward pass has finished travels while the rest of it
    still runs.

    Semantics: the original's `IPUHorovodStrategyV1`, with several replicas per instance.

    Args:
        variables_on_host: keep variables and optimizer state once per instance in host memory.

    Raises:
        MissingBackendError: Horovod is not installed; the message names the script that builds it.
        LifeCycleError: Horovod and the launcher disagree about who is there.
    """

    def __init__(self, variables_on_host: bool = False) -> None:
        popdist.init()
        super().__init__(
            popdist.instance(), horovod.communicator(), popdist.progress(), variables_on_host=variables_on_host
        )
