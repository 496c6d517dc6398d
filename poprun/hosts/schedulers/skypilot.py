"""SkyPilot, which runs a task's commands on every node (https://docs.skypilot.co, "Distributed Multi-Node Jobs")."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import quote
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler

ADDRESSES = "SKYPILOT_NODE_IPS"
RANK = "SKYPILOT_NODE_RANK"
NODES = "SKYPILOT_NUM_NODES"
GPUS = "SKYPILOT_NUM_GPUS_PER_NODE"


class SkyPilotScheduler(Scheduler):
    """The nodes of a task. A node has a slot for each GPU; without GPUs it takes any number of instances."""

    variables = (ADDRESSES,)

    def allocation(self, environ: Mapping[str, str], read_text: ReadText) -> Allocation:
        """Read the list of addresses, one on each line."""
        if environ.get(RANK, "0") != "0":
            raise UsageError(
                f"SkyPilot runs its commands on every node, and this is not the first ({quote(environ, [RANK])}); "
                f'call poprun on the first alone: `if [ "${RANK}" = 0 ]; then poprun ...; fi`'
            )
        addresses = environ[ADDRESSES].split()
        if environ.get(NODES, str(len(addresses))) != str(len(addresses)):
            raise UsageError(
                f"the variables of SkyPilot contradict each other: {quote(environ, [NODES])}, and {ADDRESSES} has "
                f"{len(addresses)} addresses; {NAME_HOSTS}, or unset {ADDRESSES}"
            )
        gpus = environ.get(GPUS, "0")
        if not gpus.isdecimal():
            raise UsageError(f"{quote(environ, [GPUS])} is not a whole number; {NAME_HOSTS}, or unset {GPUS}")
        return Allocation(
            hosts=tuple(Host(address, int(gpus) or None) for address in addresses),
            source="the task of SkyPilot",
            way_to_more="ask SkyPilot for more (num_nodes, accelerators)",
        )
