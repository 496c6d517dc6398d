from __future__ import annotations

import pytest

from poprun.agent.process_statistics import RECENT_S, OutOfMemory

OLD = "9:name=systemd:/\n4:cpuset,memory:/a/b\n0::/\n"
NEW = "0::/a/b\n"
EVENTS = "low 0\nhigh 3\nmax 2\noom 1\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.fixture(
    params=[
        (OLD, "memory/a/b/memory.oom_control", CONTROL),
        (NEW, "a/b/memory.events", EVENTS),
        (OLD, "memory/memory.oom_control", CONTROL),
        (NEW, "memory.events", EVENTS),
    ],
    ids=["first version", "second version", "first in a container", "second in a container"],
)
def counter(request, tmp_path):
    """A memory cgroup, and a function that sets its counter."""
    cgroups, name, text = request.param
    (tmp_path / "cgroup").write_text(cgroups)
    file = tmp_path / "root" / name
    file.parent.mkdir(parents=True)

    def count(kills: int) -> None:
        file.write_text(text.format(kills))

    count(2)
    return OutOfMemory(str(tmp_path / "cgroup"), str(tmp_path / "root")), count


def test_what_was_before_does_not_count(counter):
    memory, _ = counter
    assert not memory.has_just_killed(100.0)


def test_a_counter_that_has_risen_is_found(counter):
    memory, count = counter
    count(3)
    assert memory.has_just_killed(100.0)


def test_only_if_it_has_risen_lately(counter):
    memory, count = counter
    memory.look(99.0)
    count(3)
    memory.look(100.0)
    assert memory.has_just_killed(100.0 + RECENT_S)
    assert not memory.has_just_killed(100.1 + RECENT_S)


def test_nothing_is_found_where_there_is_no_counter(tmp_path):
    assert not OutOfMemory(str(tmp_path / "nowhere"), str(tmp_path)).has_just_killed(0.0)
    (tmp_path / "memory.events").write_text("low 0\n")
    (tmp_path / "cgroup").write_text(NEW)
    assert not OutOfMemory(str(tmp_path / "cgroup"), str(tmp_path)).has_just_killed(0.0)
