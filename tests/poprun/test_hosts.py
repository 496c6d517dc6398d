from __future__ import annotations

import itertools

import pytest

from poprun.cli.settings import LaunchSettings
from poprun.errors import UsageError
from poprun.hosts.hosts import Host, check_hosts, parse_hostfile, parse_hosts, recognise_this_machine, shares_of
from poprun.hosts.this_machine import is_named


def names(*lists: str) -> list[str]:
    return [host.name for host in parse_hosts(lists)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("host0", "host0"),
        ("host0,host1", "host0 host1"),
        ("host[0-2,4]", "host0 host1 host2 host4"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("node[008,10]", "node10 node008"),
        ("r[0-1]n[0-2]", "r0n0 r0n1 r0n2 r1n0 r1n1 r1n2"),
        ("a,node[1-2],b", "a node1 node2 b"),
        ("node[1-2]-ib.cluster.example", "node1-ib.cluster.example node2-ib.cluster.example"),
        ("10.77.0.[1-3]", "10.77.0.1 10.77.0.2 10.77.0.3"),
        ("node[0-6/3]", "node0 node3 node6"),
        ("node[2,0-1]", "node0 node1 node2"),
        ("host0, host1 ,host2", "host0 host1 host2"),
        ("node[0, 2]", "node0 node2"),
        ("GC_poplar-02", "GC_poplar-02"),
    ],
)
def test_lists_and_ranges_are_expanded(text, wanted):
    assert names(text) == wanted.split()


def test_hosts_keep_the_order_of_the_command_line():
    assert names("node2,node10,node1", "a") == ["node2", "node10", "node1", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,", "'a,' has an empty name; write host0,host1 without blanks or a last comma"),
        (",a", "has an empty name"),
        ("a,,b", "has an empty name"),
        ("a b", "'a b' is not the name of a host"),
        ("-a", "'-a' is not the name of a host"),
        ("a:2", "contains ':': slots are given in a hostfile"),
        ("user@a", "contains '@'"),
        ("@group", "contains '@'"),
        ("node*", r"contains '\*'"),
        ("a/b", "'a/b' is not the name of a host"),
        ("node[0-2", r"'node\[0-2' cannot be understood: missing bracket"),
        ("node[0,2", r"'node\[0,2' cannot be understood: missing bracket"),
        ("node0-2]", "cannot be understood"),
        ("node[2-0]", "cannot be understood.*write ranges like"),
        ("node[a-b]", "cannot be understood"),
        ("node[]", "cannot be understood"),
        ("a,b,a", "host a is given twice; name each host once"),
        ("node[0-2],node1", "host node1 is given twice"),
    ],
)
def test_an_invalid_list_of_hosts_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        names(text)


def test_a_host_in_two_lists_is_refused():
    with pytest.raises(UsageError, match="host a is given twice"):
        names("a,b", "c,a")


class TestHostfile:
    def test_names_slots_comments_and_empty_lines_are_read(self):
        text = "# cluster\n\nnode0 slots=4\nnode1   slots=2 max_slots=8 # the small one\nnode2\n"
        assert parse_hostfile(text, "f") == (Host("node0", 4), Host("node1", 2), Host("node2"))

    def test_the_hostfile_of_the_kubernetes_mpi_operator_is_read(self):
        text = "job-worker-0.job.default.svc slots=2\njob-worker-1.job.default.svc slots=2\n"
        assert [(host.name, host.slots) for host in parse_hostfile(text, "f")] == [
            ("job-worker-0.job.default.svc", 2),
            ("job-worker-1.job.default.svc", 2),
        ]

    @pytest.mark.parametrize(("text", "slots"), [("a\na\na\n", 3), ("a slots=2\na slots=3\n", 5), ("a slots=2\na", 3)])
    def test_lines_of_the_same_host_add_up(self, text, slots):
        assert parse_hostfile(text, "f") == (Host("a", slots),)

    def test_a_limit_alone_counts_as_slots(self):
        assert parse_hostfile("a max-slots=3", "f") == (Host("a", 3),)

    def test_blanks_around_the_equals_sign_are_accepted(self):
        assert parse_hostfile("a slots = 2 max_slots= 3\nb slots =4", "f") == (Host("a", 2), Host("b", 4))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "hostfile f names no host; write one `name slots=N` on each line"),
            ("# nothing\n\n", "names no host"),
            ("a\nb slot=2", "hostfile f, line 2: 'slot=2' is not understood"),
            ("a slots=0", "'slots=0' is not understood"),
            ("a slots=x", "'slots=x' is not understood"),
            ("a 2", "'2' is not understood"),
            ("a:2", "'a:2' is not the name of a host"),
            ("node[0-1]", "is not the name of a host; use ranges with --host"),
            ("user@a", "is not the name of a host; set the user in ~/.ssh/config"),
            ("^a", "is not the name of a host"),
        ],
    )
    def test_an_invalid_line_is_refused_with_its_number(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_hostfile(text, "f")


class TestThisMachine:
    @pytest.mark.parametrize(
        ("name", "own", "is_this"),
        [
            ("node0", ["node0"], True),
            ("NODE0", ["node0"], True),
            ("node0.east", ["node0.EAST"], True),
            ("node0", ["node01"], False),
            ("node", ["node0"], False),
            ("10.0.0.1", ["10"], False),
            ("10.0.0.1", ["node0", "10.0.0.1"], True),
            ("localhost", ["node0", "localhost"], True),
            ("node1", ["node0", "localhost"], False),
        ],
    )
    def test_the_local_machine_is_recognised_by_its_names(self, name, own, is_this):
        assert is_named(name, own, lambda host: (), {"10.0.0.1"}.__contains__) is (is_this or name == "10.0.0.1")

    @pytest.mark.parametrize("own", ["node0", "node0.east"])
    @pytest.mark.parametrize("name", ["node0", "node0.east", "Node0.west", "node0.west.example"])
    def test_a_name_equal_up_to_the_first_dot_must_resolve_to_an_own_address(self, name, own):
        for address, is_own in (("10.0.0.1", True), ("fd77::1", True), ("10.0.0.2", False)):
            found = is_named(
                name, [own, "localhost"], {name: [address]}.__getitem__, {"10.0.0.1", "fd77::1"}.__contains__
            )
            assert found is (is_own or name == own)
        assert is_named(name, [own], lambda host: (), {"10.0.0.1"}.__contains__) is (name == own)

    @pytest.mark.parametrize(
        ("name", "is_this"),
        [
            ("pod-0.job", True),
            ("Pod-0.job.default.svc", True),
            ("pod-0.job.default.svc.cluster.local", True),
            ("pod-0.jo", False),
            ("pod-0.other", False),
            ("pod-0.job.default.svc.cluster.local.x", False),
            ("pod-1.job", False),
        ],
    )
    def test_a_pod_is_recognised_by_the_beginning_of_its_full_name(self, name, is_this):
        """Nobody knows its address yet."""
        found = is_named(
            name, ["pod-0"], lambda host: (), lambda address: False, lambda: "pod-0.job.default.svc.cluster.local"
        )
        assert found is is_this

    def test_other_names_are_not_looked_up(self):
        assert not is_named("node1.east", ["node0.east", "localhost", "127.0.0.1"], {}.__getitem__, {}.__getitem__)

    def test_the_local_machine_is_marked(self):
        hosts = recognise_this_machine([Host("node0", 2), Host("node1", 2)], "node1".__eq__)
        assert hosts == (Host("node0", 2), Host("node1", 2, is_this_machine=True))

    def test_only_one_host_can_be_this_machine(self):
        with pytest.raises(UsageError, match=r"hosts node0 and node0\.example are both this machine"):
            recognise_this_machine(
                [Host("node0"), Host("node1"), Host("node0.example")], lambda name: name.startswith("node0")
            )

    def test_localhost_is_refused_among_several_hosts(self):
        with pytest.raises(UsageError, match="localhost is one of 2 hosts.*use the name that this machine has"):
            recognise_this_machine([Host("localhost"), Host("node1")], "localhost".__eq__)


def job(instances: int, replicas: int | None = None) -> LaunchSettings:
    return LaunchSettings(program=("p",), num_instances=instances, num_replicas=replicas or instances)


def hosts(count: int) -> list[Host]:
    return [Host(f"node{index}") for index in range(count)]


class TestConstraints:
    @pytest.mark.parametrize(("instances", "count"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (21, 7)])
    def test_instances_spread_evenly_are_accepted(self, instances, count):
        check_hosts(hosts(count), job(instances))

    @pytest.mark.parametrize(
        ("instances", "replicas", "count", "message"),
        [
            (6, 12, 4, "asked for 6 instances on 4 hosts; instances must divide evenly: use 4 or 12 "),
            (6, 24, 4, r"use 4 or 8 \(--num-instances\), or 3 hosts"),
            (1, 1, 2, "asked for 1 instance on 2 hosts; each host needs at least one"),
            (1, 1, 2, r"use 2 \(--num-instances\) with a multiple of 2 replicas \(--num-replicas\), or 1 host$"),
            (1, 8, 2, r"use 2 \(--num-instances\), or 1 host$"),
            (2, 12, 5, r"use 5 \(--num-instances\) with a multiple of 5 replicas .*, or 2 hosts"),
            (7, 7, 3, "use 9 .* with a multiple of 9 replicas"),
            (6, 6, 5, "use 10 .*or 3 hosts"),
        ],
    )
    def test_uneven_divisions_are_refused_with_the_nearest_numbers_that_work(self, instances, replicas, count, message):
        with pytest.raises(UsageError, match=message):
            check_hosts(hosts(count), job(instances, replicas))

    def test_no_host_gets_more_instances_than_it_has_slots(self):
        check_hosts([Host("a", 2), Host("b", 3)], job(4))
        check_hosts([Host("a", 2), Host("b", 3)], job(5))
        with pytest.raises(
            UsageError, match=r"the hosts have 5 slots, but 6 instances are asked for: use 3 \(--num-inst"
        ):
            check_hosts([Host("b", 3), Host("a", 2)], job(6))
        with pytest.raises(UsageError, match=r"have 3 slots, but 4 .*: use 3 .* with a multiple of 3 replicas"):
            check_hosts([Host("a", 1), Host("b", 1), Host("c", 1)], job(4))

    def test_hosts_with_and_without_slots_get_equal_shares(self):
        with pytest.raises(
            UsageError,
            match=r"host a has 2 slots, but 6 instances on 2 hosts need 3 on each: use 2 \(--num-instances\)",
        ):
            check_hosts([Host("b"), Host("a", 2)], job(6))
        with pytest.raises(UsageError, match="asked for 5 instances on 2 hosts; instances must divide evenly"):
            check_hosts([Host("b"), Host("a", 2)], job(5))

    @pytest.mark.parametrize(
        ("slots", "instances", "shares"),
        [
            ((4, 1, 1), 6, (4, 1, 1)),
            ((4, 1, 1), 5, (3, 1, 1)),
            ((4, 1, 1), 3, (1, 1, 1)),
            ((4, 1, 1), 7, ()),
            ((4, 1, 1), 2, ()),
            ((4, 2, 2, 1), 9, (4, 2, 2, 1)),
            ((4, 2, 2, 1), 8, (3, 2, 2, 1)),
            ((1, 3, 3), 6, (1, 3, 2)),
            ((4, 4), 4, (2, 2)),
            ((None, None), 4, (2, 2)),
            ((None, None), 3, ()),
            ((None, 2), 5, ()),
        ],
    )
    def test_shares_are_equal_or_as_equal_as_slots_allow(self, slots, instances, shares):
        assert shares_of([Host(f"h{index}", number) for index, number in enumerate(slots)], instances) == shares

    def test_every_number_from_one_per_host_to_all_slots_has_shares(self):
        for slots in itertools.product(range(1, 5), repeat=3):
            hosts = [Host(f"h{index}", number) for index, number in enumerate(slots)]
            for instances in range(3, sum(slots) + 1):
                shares = shares_of(hosts, instances)
                assert sum(shares) == instances
                assert all(1 <= share <= number for share, number in zip(shares, slots, strict=True))
