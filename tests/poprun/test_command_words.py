"""Words of the mpirun command that only some jobs need: those that shrink, have a partition, or other hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from poprun.cli.settings import Settings
from poprun.hosts.hosts import Host
from poprun.hosts.remote import Remote
from poprun.launch.command import Launch, build_command
from poprun.launch.placement import place_instances

HERE = (Host("h", is_this_machine=True),)
BOTH = (*HERE, Host("other"))
REMOTE = Remote("10.0.0.0/24", "10.0.0.1", ("-o", "BatchMode=yes"), 10.0)


def command(
    hosts: tuple[Host, ...] = HERE, remote: Remote | None = None, devices: tuple[int, ...] = (), **options: object
) -> list[str]:
    settings = Settings(program=("train",), num_instances=2, num_replicas=2, **options)
    names = [host.name for host in hosts]
    places = place_instances(settings, names, dict.fromkeys(names, ()), devices)
    return build_command(Launch(settings, hosts, places, "mpirun", "python", {}, ("PATH",), False, remote))


def following(words: list[str], word: str) -> list[str]:
    """The words that stand behind each occurrence of one."""
    return [after for before, after in zip(words, words[1:], strict=False) if before == word]


def test_only_jobs_that_shrink_have_open_mpi_tolerate_faults() -> None:
    words = command(on_failure="shrink")
    assert following(words, "--with-ft") == ["ulfm"]
    assert words.count("POPDIST_SHRINKS=1") == 2
    assert following(command(on_failure="shrink", mpi_global_args=("--with-ft", "mpi")), "--with-ft") == ["mpi"]
    for on_failure in ("stop", "restart"):
        words = command(on_failure=on_failure)
        assert "--with-ft" not in words
        assert not [word for word in words if "SHRINKS" in word]


def test_root_is_allowed_only_where_that_is_asked_for() -> None:
    assert "--allow-run-as-root" in command(allow_run_as_root=True)
    assert "--allow-run-as-root" not in command()


def test_a_partition_is_named_to_the_programs_that_use_it() -> None:
    words = command(vipu_partition="p1", devices=(4, 5))
    assert [word for word in words if "PARTITION" in word] == ["IPUOF_VIPU_API_PARTITION_ID=p1"] * 2
    assert not [word for word in command() if "PARTITION" in word]
    assert not [word for word in command(vipu_partition="p1", offline_mode=True) if "PARTITION" in word]


def test_other_hosts_are_reached_over_one_network_with_the_options_for_ssh() -> None:
    words = command(BOTH, REMOTE)
    assert following(words, "plm_ssh_args") == ["-o BatchMode=yes"]
    assert following(words, "prte_if_include") == following(words, "btl_tcp_if_include") == ["10.0.0.0/24"]
    assert following(words, "--host") == ["h:1", "other:1"]
    assert "plm_ssh_args" not in command()


def test_faults_on_purpose_reach_every_instance() -> None:
    words = command(inject=("kill:instance=0", "stop:instance=1"))
    assert words.count("POPDIST_INJECT=kill:instance=0;stop:instance=1") == 2
    assert not [word for word in command() if "INJECT" in word]


def test_each_agent_is_told_the_name_of_the_host_for_which_it_is_meant() -> None:
    words = command(BOTH, replace(REMOTE, names={"h": "h.east", "other": "other.east"}))
    assert [word for word in words if word.startswith("POPRUN_HOST")] == [
        "POPRUN_HOST=h.east",
        "POPRUN_HOST=other.east",
    ]
    for known in ({}, {"h": "h.east"}):  # mpirun gives all what the first context exports
        assert not [word for word in command(BOTH, replace(REMOTE, names=known)) if "POPRUN_HOST" in word]


def test_what_is_recorded_for_a_timeline_goes_into_a_folder_beside_it() -> None:
    folder = f"POPDIST_TIMELINE={Path('a.json.parts').absolute()}"
    words = command(timeline="a.json", timeline_limit=3)
    assert [word for word in words if "TIMELINE" in word] == [folder, "POPDIST_TIMELINE_LIMIT=3"] * 2
    assert [word for word in command(timeline="a.json") if "TIMELINE" in word] == [folder] * 2
    assert not [word for word in command(timeline_limit=3) if "TIMELINE" in word]


def test_a_profile_is_told_to_the_instances_that_record() -> None:
    assert "POPDIST_PROFILE=jax:3" in command(timeline="a.json", profile="jax:3")
    assert not [word for word in command(timeline="a.json") if "PROFILE" in word]
