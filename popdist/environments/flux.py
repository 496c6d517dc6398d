"""Tasks of `flux run`, which nothing connects (flux-environment(7))."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment, quote
from popdist.environments.single import SingleEnvironment
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

JOB = "FLUX_JOB_ID"
RANK = "FLUX_TASK_RANK"
SIZE = "FLUX_JOB_SIZE"


class FluxTaskEnvironment(Environment):
    """A task of `flux run`. A single task is one instance; several tasks are refused: nothing connects them."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return RANK in environ

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        if environ.get(SIZE, "1") != "1":
            raise EnvironmentMismatchError(
                f"flux run started several tasks ({quote(environ, (RANK, SIZE))}), and each would run alone; "
                "start the program with poprun in `flux alloc` or `flux batch`, without flux run"
            )
        return SingleEnvironment().describe(environ, num_replicas)
