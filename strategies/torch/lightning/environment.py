"""The job's processes as Lightning's Trainer sees them: poprun, mpirun, Slurm or TF_CONFIG has started them."""

from __future__ import annotations

from typing import NoReturn, final

from lightning_fabric.plugins import ClusterEnvironment
from typing_extensions import override

from strategies.errors import StrategyError
from strategies.strategy import Strategy


@final
class PopDistEnvironment(ClusterEnvironment):
    """The instances of a strategy. A process of Lightning is an instance, which may drive several replicas.

    Args:
        strategy: The strategy that connects the instances.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._instance, self._hosts = strategy.instance, strategy.communicator.hosts

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        self._refuse_process_groups()

    @property
    @override
    def main_port(self) -> int:
        self._refuse_process_groups()

    @staticmethod
    @override
    def detect() -> bool:
        """Return False: the strategy brings its environment, and other strategies need another one."""
        return False

    @override
    def world_size(self) -> int:
        return self._instance.count

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore the number: the launcher has started the instances."""

    @override
    def global_rank(self) -> int:
        return self._instance.index

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore the number: the launcher has numbered the instances."""

    @override
    def local_rank(self) -> int:
        return self._instance.local_index

    @override
    def node_rank(self) -> int:
        return self._hosts[self._instance.index]

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if a program's numbers differ from the job's.

        Raises:
            StrategyError: If `num_devices` is neither 1 nor the number of this host's instances, or `num_nodes` is
                neither 1 nor the number of hosts.
        """
        hosts = len(set(self._hosts))
        here = self._hosts.count(self.node_rank())
        for name, number, count in (("devices", num_devices, here), ("num_nodes", num_nodes, hosts)):
            if number not in (1, count):
                raise StrategyError(
                    f"the program asks Lightning for {name}={number}, but the launcher has started "
                    f"{self._instance.count} instances, {here} of them on this host, on {hosts} "
                    f"{'host' if hosts == 1 else 'hosts'}; leave out {name}, and give the numbers to poprun: "
                    "poprun --num-instances 2 --num-replicas 4 python train.py"
                )

    def _refuse_process_groups(self) -> NoReturn:
        raise StrategyError(
            "PopDist's strategy connects the instances without a process group of torch.distributed, so there is no "
            "address for one; call torch.distributed.init_process_group with an address of your own"
        )
