"""A strategy of instances already connected by threads or by a transport that a test selects."""

from __future__ import annotations

from typing import Any, final

import strategies
from collectives import Communicator
from popdist import Instance
from popdist.records.progress import ProgressPage
from strategies.defaults import Defaults
from strategies.jax.replicas.processes import Membership


@final
class Connected(Membership):
    """Instances that are already connected.

    Args:
        instance: This instance.
        communicator: The connection of all instances.
        defaults: See `Membership`.
    """

    members = "instances of a test"

    def __init__(self, instance: Instance, communicator: Communicator, defaults: Defaults | None = None) -> None:
        self._joined = instance, communicator
        super().__init__(defaults=defaults)

    def join(self) -> tuple[Instance, Communicator]:
        """Return the given instance and communicator."""
        return self._joined


@final
class ConnectedStrategy(strategies.Strategy):
    """A strategy of connected instances.

    Args:
        instance: See `Connected`.
        communicator: See `Connected`.
        progress: See `strategies.Strategy`.
        defaults: See `strategies.Strategy`.
        options: Options of `strategies.Strategy`.
    """

    def __init__(
        self,
        instance: Instance,
        communicator: Communicator,
        progress: ProgressPage | None = None,
        defaults: Defaults | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Connected(instance, communicator, defaults), progress or ProgressPage(), **options)
