import pytest

from poprun.cli.settings import LaunchSettings
from poprun.hosts.hosts import Host
from poprun.supervisor.restarts import fit, pause_s, with_instances


def job(**options):
    return LaunchSettings(program=("train",), **options)


def hosts(*slots):
    return [Host(f"node{index}", number) for index, number in enumerate(slots)]


@pytest.mark.parametrize(
    ("instances", "replicas", "slots", "expected"),
    [
        (8, 32, [None] * 4, (8, 4)),
        (8, 32, [None] * 3, (8, 2)),
        (6, 12, [None] * 3, (6, 3)),
        (3, 12, [None] * 2, (3, 1)),
        (4, 12, [2, 1], (3, 2)),
        (4, 8, [2, 1], (2, 2)),
        (8, 8, [2, 2, 2], (4, 2)),
        (4, 4, [1], (1, 1)),
    ],
)
def test_fit_finds_the_largest_number_of_instances_for_the_hosts(instances, replicas, slots, expected):
    found, chosen = fit(job(num_instances=instances, num_replicas=replicas), hosts(*slots))
    assert (found.num_instances, chosen) == (expected[0], tuple(hosts(*slots)[: expected[1]]))


def test_replicas_divide_evenly_among_fewer_instances():
    found, chosen = fit(job(num_instances=5, num_replicas=10), hosts(4))
    assert (found.num_instances, chosen) == (2, tuple(hosts(4)))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [((2, 2, 2), (4, 2, 3)), ((2, 2), (4, 0, 2)), ((2, 3), (4, 1, 2)), ((3,), (2, 1, 1)), ((1, 2), (2, 1, 2))],
)
def test_spares_get_the_room_that_instances_leave(slots, expected):
    wanted = job(num_instances=4, num_replicas=8, spares=2, on_failure="replace", inject=("kill:instance=5",))
    found, chosen = fit(wanted, hosts(*slots))
    assert (found.num_instances, found.spares, len(chosen)) == expected
    assert found.on_failure == ("replace" if found.spares else "shrink")
    assert found.inject == (("kill:instance=5",) if expected[:2] == (4, 2) else ())


def test_fewer_instances_than_the_minimum_do_not_fit():
    assert fit(job(num_instances=4, num_replicas=4, min_instances=2), hosts(1)) is None


def test_no_instances_fit_without_hosts():
    assert fit(job(num_instances=4, num_replicas=4), []) is None


def test_settings_of_omitted_instances_are_dropped():
    faults = ("kill:instance=0", "kill:instance=3")
    wanted = job(num_instances=4, num_replicas=4, inject=faults, only_output_from_instance=3, min_instances=2)
    fewer = with_instances(wanted, 2)
    assert (fewer.num_instances, fewer.num_replicas, fewer.min_instances) == (2, 4, 2)
    assert (fewer.inject, fewer.only_output_from_instance) == (("kill:instance=0",), 0)
    assert with_instances(wanted, 4) == wanted


@pytest.mark.parametrize(
    ("first_s", "pauses"), [(0.5, [0.5, 1, 2, 4]), (0, [0, 0]), (100, [100, 200, 300, 300]), (400, [400, 400])]
)
def test_the_pause_doubles_up_to_five_minutes_or_the_first_pause(first_s, pauses):
    assert [pause_s(first_s, made) for made in range(len(pauses))] == pauses
    assert pause_s(first_s, 2**31) == (0 if first_s == 0 else max(first_s, 300))
