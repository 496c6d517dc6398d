"""A simulated V-IPU partition, whose size is a power of two, and the device of each instance. Pure.

The semantics are those of Graphcore's V-IPU and `gc-info`. A partition of P IPUs has P devices of one IPU with the ids
0 to P - 1, then P / 2 devices of two IPUs, and so on up to one device of all IPUs. An instance takes one device that
spans all its replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poprun.cli.settings import PARTITION_VARIABLE, LaunchSettings
from poprun.cli.wording import count, name_nearest
from poprun.errors import UsageError

FILE_SUFFIX = ".toml"
"""The file name suffix of a device map; any other word names a partition that is created to fit."""

_KEYS = ("ipus", "devices")


@dataclass(frozen=True)
class Partition:
    """A simulated partition.

    Attributes:
        name: The name, for messages.
        ipus: The number of IPUs.
        devices: The device id of each instance. Empty: by the rule of the real server.

    Raises:
        UsageError: The size is not a power of two, or ids are negative or repeated.
    """

    name: str
    ipus: int
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _is_power_of_two(self.ipus):
            raise UsageError(f"partition {self.name} has {count(self.ipus, 'IPU')}; the size must be a power of two")
        if any(device < 0 for device in self.devices) or len(set(self.devices)) < len(self.devices):
            raise UsageError(
                f"partition {self.name} lists the devices {', '.join(map(str, self.devices))}; "
                "each instance needs its own device, numbered from 0"
            )


def parse_device_map(text: str, path: str) -> Partition:
    """Return the partition in a device map, a TOML file.

    The keys are `ipus`, the size, and optionally `devices`, the device id of each instance in order.

    Raises:
        UsageError: The text is not TOML, or a key is unknown, missing or of the wrong type.
    """
    import tomllib  # takes some milliseconds to load, and few launches have a device map

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"device map {path} is not TOML: {error}") from None
    for key in table:
        if key not in _KEYS:
            raise UsageError(f"device map {path} has an unknown key {key}{name_nearest(key, _KEYS)}; use ipus, devices")
    return Partition(path, _read_size(table, path), _read_devices(table, path))


def fit_partition(partition: Partition | None, name: str, settings: LaunchSettings) -> Partition:
    """Return the partition that a job runs on.

    Args:
        partition: The partition of a device map. None: a partition is created.
        name: The name of the created partition.
        settings: The settings with replicas, instances and the permission to change the partition's size.

    Raises:
        UsageError: The job does not need a power of two, or the partition has another size or number of devices.
    """
    ipus, instances = settings.num_ipus, settings.num_instances
    demand = f"{count(ipus, 'IPU')} ({count(settings.num_replicas, 'replica')} x {settings.ipus_per_replica})"
    if not _is_power_of_two(ipus):
        below = 1 << (ipus.bit_length() - 1)
        raise UsageError(
            f"the job needs {demand}, but the size of a partition must be a power of two: "
            f"use {below} or {2 * below} (--num-replicas, --ipus-per-replica), or name no partition "
            f"(--vipu-partition, {PARTITION_VARIABLE})"
        )
    if partition is None:
        return Partition(name, ipus)
    if partition.ipus != ipus and not settings.update_partition:
        raise UsageError(
            f"partition {partition.name} has {count(partition.ipus, 'IPU')}, but the job needs {demand}; "
            "choose equal numbers, or give --update-partition yes"
        )
    if partition.devices and len(partition.devices) != instances:
        raise UsageError(
            f"partition {partition.name} lists {count(len(partition.devices), 'device')}, but the job has "
            f"{count(instances, 'instance')}; list one for each, or none"
        )
    return Partition(partition.name, ipus, partition.devices)


def device_ids(partition: Partition, instances: int) -> tuple[int, ...]:
    """Return the device of each instance: neighbours among the devices of the right size.

    Example: 4 instances on 16 IPUs get the devices 24 to 27, after 16 devices of one IPU and 8 of two.
    """
    if partition.devices:
        return partition.devices
    first = 2 * partition.ipus - 2 * instances
    return tuple(range(first, first + instances))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _read_size(table: Mapping[str, object], path: str) -> int:
    size = table.get("ipus")
    if type(size) is not int:
        raise UsageError(f"device map {path} does not give its size as a whole number; write `ipus = 16`")
    return size


def _read_devices(table: Mapping[str, object], path: str) -> tuple[int, ...]:
    devices = table.get("devices", [])
    if not isinstance(devices, list) or any(type(device) is not int for device in devices):
        raise UsageError(f"device map {path}: devices is not a list of whole numbers; write `devices = [24, 25]`")
    return tuple(devices)
