"""The numbers of instances and replicas of a job, from its launcher and the defaults of its strategy.

The launcher's numbers win. poprun fixes instances and replicas. Open MPI, Slurm and TF_CONFIG fix only the instances;
the defaults give the replicas of each instance. Without a launcher the defaults give them too.
"""

from __future__ import annotations

from dataclasses import replace

import popdist
from popdist.instance import Instance
from strategies.defaults import Defaults, rounded_to_power_of_two


def replicas_of_process(defaults: Defaults, ipus_per_replica: int | None) -> tuple[int, int]:
    """Return (replicas, devices per replica) for a strategy of one process that was given no number of replicas.

    Args:
        defaults: Default options of the strategy.
        ipus_per_replica: Devices per replica that the program asks for, or None.

    Raises:
        ValueError: If the configured IPUs are too few.
        EnvironmentMismatchError: If poprun started this process with other numbers than the defaults have.
    """
    if defaults.selection is None:
        return 1, ipus_per_replica or 1
    instance = popdist.instance()
    if instance.launcher == "poprun":
        refuse_contradictions(defaults, instance)
        return instance.local_replicas, ipus_per_replica or instance.ipus_per_replica
    return defaults.selection.replicas(ipus_per_replica or 1), ipus_per_replica or 1


def replicas_of_instance(defaults: Defaults, ipus_per_replica: int | None) -> int | None:
    """Return the default number of replicas per instance; None without IPUs, or if poprun fixes the number.

    Raises:
        ValueError: If the configured IPUs are too few.
    """
    if defaults.selection is None or popdist.instance().launcher == "poprun":
        return None
    return defaults.selection.replicas(ipus_per_replica or popdist.instance().ipus_per_replica)


def join_as_configured(defaults: Defaults, ipus_per_replica: int | None) -> Instance:
    """Call `popdist.init` with the number of replicas that the defaults give, unless poprun fixes it.

    Raises:
        ValueError: If the configured IPUs are too few.
        EnvironmentMismatchError: If the defaults contradict the launcher.
    """
    each = None if popdist.isBackendInitialized() else replicas_of_instance(defaults, ipus_per_replica)
    popdist.init(None if each is None else each * popdist.instance().count)
    instance = popdist.instance()
    spanning = instance if ipus_per_replica is None else replace(instance, ipus_per_replica=ipus_per_replica)
    refuse_contradictions(defaults, spanning)
    return instance


def refuse_contradictions(defaults: Defaults, instance: Instance) -> None:
    """Refuse defaults that describe another instance, or another number of replicas than this instance has.

    Raises:
        EnvironmentMismatchError: If the defaults contradict `instance`.
    """
    refuse_other_process(defaults, instance)
    selection = defaults.selection
    if selection is None or not selection.is_counted:
        return
    spanned, local, total = instance.ipus_per_replica, instance.local_replicas, instance.total_replicas
    # The number may mean the IPUs of this process, as in the original, or of all instances.
    every = {replicas * ipus for replicas in (local, total) for ipus in (spanned, rounded_to_power_of_two(spanned))}
    if selection.ipus not in every:
        raise popdist.EnvironmentMismatchError(
            f"{selection.said}, but this instance has {local} of {total} replicas that span {spanned} IPUs each "
            f"({instance.launcher}); set it to {local * spanned}, or to {total * spanned} for all instances, leave it "
            "out, or configure before popdist.init"
        )


def refuse_other_process(defaults: Defaults, instance: Instance) -> None:
    """Refuse defaults that name another process than this instance.

    Raises:
        EnvironmentMismatchError: If `process_index` or `process_count` differ from the instance's.
    """
    count, index = defaults.process_count, defaults.process_index
    if count and (count, index) != (instance.count, instance.index):
        raise popdist.EnvironmentMismatchError(
            f"the configuration has process_index {index} of process_count {count}, but this is instance "
            f"{instance.index} of {instance.count} ({instance.launcher}); leave "
            "experimental.multi_replica_distribution out, or let popdist.tensorflow.set_ipu_config set it"
        )
