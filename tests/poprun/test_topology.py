from __future__ import annotations

import pytest

from poprun.launch.placement import Place
from poprun.launch.topology import draw_topology


def places(instances: int, replicas: int, host: str) -> list[Place]:
    local = replicas // instances
    return [Place(i, host, i, range(i * local, (i + 1) * local)) for i in range(instances)]


def test_the_first_public_sample():
    assert draw_topology(places(2, 2, "a-long-host-name")).splitlines() == [
        " ===================",
        "|  poprun topology  |",
        "|===================|",
        "| hosts     |  [0]  |",
        "|-----------|-------|",
        "| ILDs      |   0   |",
        "|-----------|-------|",
        "| instances | 0 | 1 |",
        "|-----------|-------|",
        "| replicas  | 0 | 1 |",
        " -------------------",
        " [0] = a-long-host-name",
    ]


def test_the_second_public_sample():
    assert draw_topology(places(1, 4, "gc-poplar-02")).splitlines() == [
        " ===========================",
        "|      poprun topology      |",
        "|===========================|",
        "| hosts     | gc-poplar-02  |",
        "|-----------|---------------|",
        "| ILDs      |       0       |",
        "|-----------|---------------|",
        "| instances |       0       |",
        "|-----------|---------------|",
        "| replicas  | 0 | 1 | 2 | 3 |",
        " ---------------------------",
    ]


def test_cells_are_as_wide_as_the_widest_index():
    lines = draw_topology(places(4, 12, "node")).splitlines()
    assert lines[9] == "| replicas  | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  | 10 | 11 |"
    assert lines[7] == "| instances |      0       |      1       |      2       |      3       |"
    assert {len(line) for line in lines[1:-1]} == {len(lines[0]) + 1}


@pytest.mark.parametrize("columns", [80, 60, 20])
def test_what_does_not_fit_the_page_stands_in_tables_below(columns):
    lines = draw_topology(places(4, 40, "a-long-name" * 9), columns).splitlines()
    assert max(map(len, lines[:-1])) <= max(columns, 20)
    cells = [cell.strip() for line in lines if "replicas" in line for cell in line.split("|")[2:-1]]
    assert cells == [str(replica) for replica in range(40)]
    assert [line for line in lines if " = " in line] == [f" [0] = {'a-long-name' * 9}"]


def test_tables_are_cut_between_instances_where_one_fits():
    lines = draw_topology(places(4, 40, "node"), 80).splitlines()
    assert [line.split("|")[2].strip() for line in lines if "instances" in line] == ["0", "1", "2", "3"]


def test_hosts_span_their_replicas():
    two_hosts = [Place(0, "a", 0, range(0, 2)), Place(1, "b", 0, range(2, 4))]
    assert draw_topology(two_hosts).splitlines()[3] == "| hosts     |   a   |   b   |"


def test_a_host_whose_name_is_too_long_is_explained_below():
    lines = draw_topology(places(1, 1, "node")).splitlines()
    assert lines[3] == "| hosts     |[0]|"
    assert lines[-1] == " [0] = node"


def many(instances: int, replicas: int, hosts: list[str], domains: int = 1) -> list[Place]:
    local, share = replicas // instances, instances // len(hosts)
    return [
        Place(i, hosts[i // share], i % share, range(i * local, (i + 1) * local), domain=i * domains // instances)
        for i in range(instances)
    ]


def test_hosts_domains_and_instances_are_centred_over_their_replicas():
    assert draw_topology(many(4, 8, ["node0", "node1"], domains=2)).splitlines() == [
        " ===========================================",
        "|              poprun topology              |",
        "|===========================================|",
        "| hosts     |     node0     |     node1     |",
        "|-----------|-------------------------------|",
        "| ILDs      |       0       |       1       |",
        "|-----------|-------------------------------|",
        "| instances |   0   |   1   |   2   |   3   |",
        "|-----------|-------------------------------|",
        "| replicas  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |",
        " -------------------------------------------",
    ]


def test_domains_may_lie_across_hosts():
    lines = draw_topology(many(6, 6, ["a", "b"], domains=3)).splitlines()
    assert lines[3] == "| hosts     |     a     |     b     |"
    assert lines[5] == "| ILDs      |   0   |   1   |   2   |"


def test_only_the_hosts_whose_names_are_too_long_are_explained():
    uneven = [Place(0, "abcd", 0, range(0, 1)), Place(1, "a-long-name", 0, range(1, 2)), Place(2, "c", 0, range(2, 3))]
    lines = draw_topology(uneven).splitlines()
    assert lines[3] == "| hosts     |[0]|[1]| c |"
    assert lines[-2:] == [" [0] = abcd", " [1] = a-long-name"]


def test_a_name_may_fill_its_span():
    hosts = [Place(0, "vm", 0, range(0, 1)), Place(1, "abc", 0, range(1, 2)), Place(2, "abcdefg", 0, range(2, 4))]
    lines = draw_topology(hosts).splitlines()
    assert lines[3] == "| hosts     |vm |abc|abcdefg|"
    assert len(lines) == 11


def test_the_index_of_a_host_fits_however_many_there_are():
    lines = draw_topology(many(12, 12, [f"node{i:02}" for i in range(12)])).splitlines()
    assert lines[3].endswith("|[9] |[10]|[11]|")
    assert {len(line) for line in lines[1:10]} == {len(lines[0]) + 1}
