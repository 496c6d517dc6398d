"""A strategy of instances that something else has connected: threads, or a transport of a test's own choice."""

from __future__ import annotations

from typing import Any, final

import strategies
from collectives import Communicator
from popdist import Instance
from popdist.records import NoProgress, Progress
from strategies.defaults import Defaults
from strategies.jax.replicas.membership import Membership


@final
class Connected(Membership):
    """Instances that are connected already.

    Args:
        instance: this one.
        communicator: connects them.
        defaults: see `Membership`.
    """

    members = "instances of a test"

    def __init__(self, instance: Instance, communicator: Communicator, defaults: Defaults | None = None) -> None:
        self._joined = instance, communicator
        super().__init__(defaults=defaults)

    def join(self) -> tuple[Instance, Communicator]:
        """What was given."""
        return self._joined


@final
class ConnectedStrategy(strategies.Strategy):
    """Their replicas.

    Args:
        instance: see `Connected`.
        communicator: see `Connected`.
        progress: see `strategies.Strategy`.
        defaults: see there.
        options: of `strategies.Strategy`.
    """

    def __init__(
        self,
        instance: Instance,
        communicator: Communicator,
        progress: Progress | None = None,
        defaults: Defaults | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Connected(instance, communicator, defaults), progress or NoProgress(), **options)
