from __future__ import annotations

import pytest

from poprun.cli.settings import LaunchSettings
from poprun.errors import UsageError
from poprun.launch.partition import Partition, device_ids, fit_partition, parse_device_map


def test_devices_equal_the_public_sample():
    """The original documentation shows the devices 24 to 27 for four instances with four IPUs each."""
    assert device_ids(Partition("p", 16), 4) == (24, 25, 26, 27)


@pytest.mark.parametrize(
    ("ipus", "instances", "devices"),
    [
        (1, 1, [0]),
        (2, 2, [0, 1]),
        (2, 1, [2]),
        (8, 8, range(8)),
        (8, 4, range(8, 12)),
        (16, 1, [30]),
        (64, 2, [124, 125]),
    ],
)
def test_devices_of_one_size_are_numbered_after_all_smaller_ones(ipus, instances, devices):
    assert device_ids(Partition("p", ipus), instances) == tuple(devices)


def test_a_device_map_sets_the_devices():
    assert device_ids(Partition("p", 4, (3, 1)), 2) == (3, 1)


class TestDeviceMap:
    def test_size_and_devices_are_read(self):
        assert parse_device_map("ipus = 16\ndevices = [24, 26]", "m.toml") == Partition("m.toml", 16, (24, 26))
        assert parse_device_map("ipus = 16", "m.toml") == Partition("m.toml", 16)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("ipus = ", "device map m.toml is not TOML"),
            ("ipsu = 16", "unknown key ipsu, did you mean ipus"),
            ("", "does not give its size as a whole number"),
            ('ipus = "16"', "does not give its size as a whole number"),
            ("ipus = true", "does not give its size as a whole number"),
            ("ipus = 12", "m.toml has 12 IPUs; the size must be a power of two"),
            ("ipus = 0", "a power of two"),
            ("ipus = 2\ndevices = 1", "devices is not a list of whole numbers"),
            ("ipus = 2\ndevices = [0.5]", "devices is not a list of whole numbers"),
            ("ipus = 2\ndevices = [1, 1]", "each instance needs its own device"),
            ("ipus = 2\ndevices = [-1, 1]", "each instance needs its own device"),
        ],
    )
    def test_an_invalid_device_map_is_refused(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_device_map(text, "m.toml")


def need(replicas, per_replica, instances, **options):
    numbers = {"num_replicas": replicas, "ipus_per_replica": per_replica, "num_instances": instances}
    return LaunchSettings(("p",), **numbers, **options)


class TestFit:
    def test_a_partition_without_a_map_is_created_with_the_needed_size(self):
        assert fit_partition(None, "p", need(4, 4, 2)) == Partition("p", 16)

    def test_a_partition_of_the_right_size_is_kept(self):
        partition = Partition("p", 16, (5, 6))
        assert fit_partition(partition, "p", need(16, 1, 2)) == partition

    @pytest.mark.parametrize("ipus", [8, 32])
    def test_a_partition_of_another_size_is_refused_unless_it_may_be_changed(self, ipus):
        with pytest.raises(
            UsageError, match=rf"has {ipus} IPUs, but the job needs 16 IPUs \(4 replicas x 4\); choose equal"
        ):
            fit_partition(Partition("p", ipus), "p", need(4, 4, 1))
        assert fit_partition(Partition("p", ipus), "p", need(4, 4, 1, update_partition=True)) == Partition("p", 16)

    @pytest.mark.parametrize(
        ("replicas", "per_replica", "nearest"), [(6, 1, "4 or 8"), (3, 4, "8 or 16"), (5, 5, "16 or 32")]
    )
    def test_a_size_other_than_a_power_of_two_is_refused(self, replicas, per_replica, nearest):
        with pytest.raises(UsageError, match=f"the size of a partition must be a power of two: use {nearest} "):
            fit_partition(None, "p", need(replicas, per_replica, 1, update_partition=True))

    def test_the_device_map_must_list_one_device_per_instance(self):
        with pytest.raises(UsageError, match="lists 2 devices, but the job has 4 instances"):
            fit_partition(Partition("p", 4, (0, 1)), "p", need(4, 1, 4, update_partition=True))
