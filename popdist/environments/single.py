"""Processes without a launcher: a single instance drives every replica."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment, LaunchedProcess
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

ALONE_VARIABLE = "POPDIST_ALONE"
"""1 makes a process that an instance starts run on its own, outside the job, with one replica by default."""


class SingleEnvironment(Environment):
    """A process without a launcher. Always active, hence last in detection order. Default: one replica."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return True

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        if num_replicas is not None and num_replicas < 1:
            raise EnvironmentMismatchError(f"asked for {num_replicas} replicas; use 1 or more")
        return LaunchedProcess(rank=0, size=1, local_rank=0).instance(num_replicas, "", "single")


class AloneEnvironment(Environment):
    """A child process that an instance started with POPDIST_ALONE=1; the launcher's variables are ignored."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return environ.get(ALONE_VARIABLE) == "1"

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        return SingleEnvironment().describe(environ, num_replicas)
