"""A process that nobody launched: one instance that drives every replica."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

ALONE_VARIABLE = "POPDIST_ALONE"
"""Set to 1 for a process that an instance starts, and that is to run by itself."""


class SingleEnvironment(Environment):
    """No launcher."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        """Always true: this is the last resort."""
        return True

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        """One instance with `num_replicas` replicas, by default one."""
        total = 1 if num_replicas is None else num_replicas
        if total < 1:
            raise EnvironmentMismatchError(f"asked for {total} replicas; use 1 or more")
        return Instance(
            index=0,
            count=1,
            local_replicas=total,
            replica_offset=0,
            total_replicas=total,
            local_index=0,
            launcher="single",
        )


class AloneEnvironment(Environment):
    """A process that an instance started, and that is to be one instance of its own."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        """Return whether POPDIST_ALONE is 1."""
        return environ.get(ALONE_VARIABLE) == "1"

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        """Return one instance, whatever the variables of the launcher say."""
        return SingleEnvironment().describe(environ, num_replicas)
