"""Flux (https://flux-framework.readthedocs.io), which tells a job's hosts by a command and not by variables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from popdist.environments.environment import quote
from popdist.environments.flux import JOB, SIZE
from poprun.cli.wording import cut_off
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler
from poprun.hosts.schedulers.slurm import expand_nodes

INSTANCE = "FLUX_URI"
BATCH_JOB = "FLUX_ENCLOSING_ID"
LIMIT_S = 20.0
"""The limit for an answer of Flux."""


class FluxScheduler(Scheduler):
    """The nodes of `flux alloc`, `flux batch` or `flux run -n1`; a node has a slot for each core."""

    variables = (INSTANCE,)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation:
        """Ask Flux for the resources of this job: in a task of `flux run` its own, otherwise all of the instance."""
        if environ.get(SIZE, "1") != "1":
            raise UsageError(
                f"flux run started poprun as one of several tasks ({quote(environ, [SIZE])}), and each would start "
                "every instance; call poprun in `flux alloc` or `flux batch`, without flux run"
            )
        words = ("flux", "job", "info", environ[JOB], "R") if JOB in environ else ("flux", "resource", "R")
        return Allocation(
            hosts=parse_resources(_ask(words, environ)),
            source=f"Flux job {environ.get(JOB) or environ.get(BATCH_JOB, 'of unknown number')}",
            way_to_more="ask Flux for more (flux batch -N -n -c)",
        )


def parse_resources(text: str) -> tuple[Host, ...]:
    """Return the hosts in a resource set of Flux, with a slot for each core.

    The format is version 1 of RFC 20 (https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_20.html):
    the n-th name of the list of nodes belongs to the n-th of the ranks, in ascending order.

    Raises:
        UsageError: The text is no such set.
    """
    try:
        execution = json.loads(text)["execution"]
        cores = {
            rank: len(_numbers(entry["children"]["core"]))
            for entry in execution["R_lite"]
            for rank in _numbers(entry["rank"])
        }
        names = [name for part in execution["nodelist"] for name in expand_nodes(part)]
        slots: Counter[str] = Counter()
        for name, (_, number) in zip(names, sorted(cores.items()), strict=True):
            slots[name] += number
    except (ValueError, KeyError, TypeError, AttributeError, UsageError):  # the last names Slurm
        raise UsageError(
            f"the resources of Flux cannot be understood: {cut_off(' '.join(text.split()))}; {NAME_HOSTS}"
        ) from None
    return tuple(Host(name, number) for name, number in slots.items())


def _numbers(text: str) -> list[int]:
    """Return the numbers in a set such as `0-2,5` (RFC 22)."""
    ranges = [piece.partition("-") for piece in text.strip("[]").split(",")]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _ask(words: tuple[str, ...], environ: Mapping[str, str]) -> str:
    import subprocess  # takes some milliseconds to load, and only Flux needs it

    shown = " ".join(words)
    try:
        ended = subprocess.run(
            words, env=dict(environ), capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer within {LIMIT_S:g} s"
        raise UsageError(f"{quote(environ, [INSTANCE])}, but `{shown}` failed: {reason}; {NAME_HOSTS}") from None
    if ended.returncode:
        said = cut_off(ended.stderr.strip().splitlines()[-1]) if ended.stderr.strip() else f"exit {ended.returncode}"
        raise UsageError(f"{quote(environ, [INSTANCE])}, but `{shown}` failed: {said}; {NAME_HOSTS}")
    return ended.stdout
