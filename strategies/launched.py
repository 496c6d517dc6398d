"""The numbers of instances and replicas where a job has a launcher and its strategy has defaults.

The launcher's numbers decide. poprun fixes all of them. Open MPI, Slurm and TF_CONFIG fix the instances, and the
defaults say how many replicas each instance has. Without a launcher the defaults say it too.
"""

from __future__ import annotations

from dataclasses import replace

import popdist
from popdist.instance import Instance
from strategies.defaults import Defaults, rounded_to_power_of_two


def replicas_of_process(defaults: Defaults, ipus_per_replica: int | None) -> tuple[int, int]:
    """Return the replicas of a strategy of one process that names none, and the devices that each spans.

    Args:
        defaults: of the strategy.
        ipus_per_replica: that the strategy names.

    Raises:
        ValueError: if the IPUs are not enough.
        EnvironmentMismatchError: poprun has started this process for others.
    """
    if defaults.selection is None:
        return 1, ipus_per_replica or 1
    instance = popdist.instance()
    if instance.launcher == "poprun":
        refuse_contradictions(defaults, instance)
        return instance.local_replicas, ipus_per_replica or instance.ipus_per_replica
    return defaults.selection.replicas(ipus_per_replica or 1), ipus_per_replica or 1


def replicas_of_instance(defaults: Defaults, ipus_per_replica: int | None) -> int | None:
    """Return the replicas of each instance by the defaults; None if they name no IPUs, or poprun fixes the number.

    Raises:
        ValueError: if the IPUs are not enough.
    """
    if defaults.selection is None or popdist.instance().launcher == "poprun":
        return None
    return defaults.selection.replicas(ipus_per_replica or popdist.instance().ipus_per_replica)


def join_as_configured(defaults: Defaults, ipus_per_replica: int | None) -> Instance:
    """Call `popdist.init` for as many replicas as the defaults say, unless poprun fixes the number.

    Raises:
        ValueError: if the IPUs are not enough.
        EnvironmentMismatchError: see `refuse_contradictions`.
    """
    each = None if popdist.isBackendInitialized() else replicas_of_instance(defaults, ipus_per_replica)
    popdist.init(None if each is None else each * popdist.instance().count)
    instance = popdist.instance()
    spanning = instance if ipus_per_replica is None else replace(instance, ipus_per_replica=ipus_per_replica)
    refuse_contradictions(defaults, spanning)
    return instance


def refuse_contradictions(defaults: Defaults, instance: Instance) -> None:
    """Refuse defaults that describe another instance, or other replicas than this instance has.

    Raises:
        EnvironmentMismatchError: if they do.
    """
    refuse_other_process(defaults, instance)
    selection = defaults.selection
    if selection is None or not selection.is_counted:
        return
    spanned, local, total = instance.ipus_per_replica, instance.local_replicas, instance.total_replicas
    # IPUs of this process, as in the original, or of all instances
    every = {replicas * ipus for replicas in (local, total) for ipus in (spanned, rounded_to_power_of_two(spanned))}
    if selection.ipus not in every:
        raise popdist.EnvironmentMismatchError(
            f"{selection.said}, and this instance has {local} of {total} replicas that span {spanned} IPUs each "
            f"({instance.launcher}); make it {local * spanned}, or {total * spanned} for all instances, leave it out, "
            "or configure before popdist.init"
        )


def refuse_other_process(defaults: Defaults, instance: Instance) -> None:
    """Refuse defaults that name another process than this instance.

    Raises:
        EnvironmentMismatchError: if they do.
    """
    count, index = defaults.process_count, defaults.process_index
    if count and (count, index) != (instance.count, instance.index):
        raise popdist.EnvironmentMismatchError(
            f"the configuration has process_index {index} of process_count {count}, and this is instance "
            f"{instance.index} of {instance.count} ({instance.launcher}); leave "
            "experimental.multi_replica_distribution out, or have popdist.tensorflow.set_ipu_config set it"
        )
