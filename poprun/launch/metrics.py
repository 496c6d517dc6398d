"""Where metrics go: what instances are told, and what is looked at before any of them is started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from popdist.records.metric_words import (
    RUN_VARIABLE,
    VARIABLE,
    MetricWord,
    fault_of_library,
    fault_of_place,
    parse_words,
)
from poprun.cli.settings import Settings
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.launch.placement import Place


def metric_variables(settings: Settings) -> dict[str, str]:
    """What instances are told."""
    if not settings.metrics:
        return {}
    words = ",".join(str(word.absolute) for word in parse_words(settings.metrics))
    return {VARIABLE: words, RUN_VARIABLE: settings.metrics_run}


def check_sinks(settings: Settings, hosts: tuple[Host, ...], first: Place, environ: Mapping[str, str]) -> None:
    """Refuse what instance 0 could not write, where it runs beside poprun; elsewhere it refuses that itself.

    Args:
        settings: what the user asked for.
        hosts: of the job.
        first: where instance 0 runs.
        environ: has the path on which programs are found.

    Raises:
        UsageError: it could not.
    """
    if not any(host.name == first.host and host.is_this_machine for host in hosts):
        return
    is_same_python = _is_in_same_environment(settings.program[0], environ)
    for word in parse_words(settings.metrics):
        if fault := _fault(word, is_same_python):
            raise UsageError(f"--metrics {fault}")


def _fault(word: MetricWord, is_same_python: bool) -> str:
    return (fault_of_library(word) if is_same_python else "") or fault_of_place(word)


def _is_in_same_environment(program: str, environ: Mapping[str, str]) -> bool:
    """Whether a program is a file of the environment that poprun runs in, where its packages are the same."""
    found = shutil.which(program, path=environ.get("PATH"))
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
