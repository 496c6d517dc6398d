from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from poprun.cli.settings import LaunchSettings
from poprun.hosts.hosts import Host
from poprun.hosts.remote import Remote
from poprun.hosts.this_machine import Core
from poprun.ipc.wire import mark, unmark
from poprun.launch.launch import AGENT, Across, Launch, build_command
from poprun.launch.placement import place_instances
from poprun.launch.variables import extra_variables, meeting_point

TWO_CORES = [Core(0, 0, 0, 0), Core(0, 0, 1, 1)]


HERE = (Host("h", is_this_machine=True),)
BOTH = (*HERE, Host("other"))
REMOTE = Remote("10.0.0.0/24", "10.0.0.1", ("-o", "BatchMode=yes"), 10.0)
GRAMMAR = (":", "--", "-np", "-n", "-x", "--mca", "-gmca", "--prtemca", "--hostfile", "@file", "--bind-to", "--version")
TWO = {"num_instances": 2, "num_replicas": 2}


def command(
    *program, cores=TWO_CORES, forwarded=("PATH",), extra=None, hosts=HERE, remote=None, devices=(), **options
) -> list[str]:
    settings = LaunchSettings(program=program or ("python3", "train.py", "--lr=0.1"), **options)
    names = [host.name for host in hosts]
    launch = Launch(
        settings=settings,
        hosts=hosts,
        places=place_instances(
            settings, names, dict.fromkeys(names, cores), devices, spares=(settings.spares,) if settings.spares else ()
        ),
        mpirun="/opt/mpirun",
        python="/opt/python",
        extra=extra or {"PJRT_NPROC": "8"},
        forwarded=forwarded,
        oversubscribes=settings.num_instances > len(cores),
        remote=remote,
    )
    return build_command(launch)


def pair(hosts=HERE, remote=None, **options) -> list[str]:
    return command(hosts=hosts, remote=remote, **TWO, **options)


def exported(words: list[str]) -> list[dict[str, str]]:
    """Return the variables that each application context exports with a value."""
    contexts = " ".join(words).split(" : ")
    pairs = [[w for w in context.split() if "=" in w and not w.startswith("+")] for context in contexts]
    return [dict(pair.split("=", 1) for pair in each) for each in pairs]


def test_each_instance_is_told_its_rank_for_torch_distributed():
    hosts = (Host("a"), Host("b"))
    point = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    told = exported(command(hosts=hosts, num_instances=4, num_replicas=4, extra=point))
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *point)
    assert [[each[name] for name in names] for each in told] == [
        ["0", "0", "0", "0", "4", "2", "a", "29500"],
        ["1", "1", "0", "0", "4", "2", "a", "29500"],
        ["2", "0", "1", "1", "4", "2", "a", "29500"],
        ["3", "1", "1", "1", "4", "2", "a", "29500"],
    ]


@pytest.mark.parametrize(
    ("hosts", "here", "address"),
    [
        (HERE, "", "127.0.0.1"),
        ((*HERE, Host("b")), "10.0.0.7", "10.0.0.7"),
        ((*HERE, Host("b")), "", "h"),  # a dry run
        ((Host("b"), *HERE), "10.0.0.7", "b"),
        ((Host("b"),), "10.0.0.7", "b"),
    ],
)
def test_instance_0_is_the_meeting_point_of_torch_distributed(hosts, here, address):
    point = meeting_point(hosts, here)
    assert point["MASTER_ADDR"] == address
    assert 20000 <= int(point["MASTER_PORT"]) < 32768


@pytest.mark.parametrize(
    ("words", "environ"), [(("-x", "MASTER_PORT=1"), {}), ((), {"MASTER_PORT": "1"})], ids=["exported", "environment"]
)
def test_a_port_of_the_user_is_left_as_it_is(words, environ):
    settings = LaunchSettings(("train.py",), mpi_local_args=words)
    extra = extra_variables(settings, meeting_point(HERE, ""), environ)
    assert extra.get("MASTER_ADDR") == "127.0.0.1"
    assert "MASTER_PORT" not in extra


def test_spares_have_ranks_behind_the_instances_and_are_not_counted():
    told = exported(command(num_instances=2, num_replicas=2, spares=1, on_failure="replace"))
    assert [[each[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] for each in told] == [
        ["0", "2", "2"],
        ["1", "2", "2"],
        ["2", "2", "2"],
    ]


def test_the_words_of_the_command_have_the_order_of_the_original():
    words = command(
        num_replicas=4,
        ipus_per_replica=2,
        mpi_global_args=("--tag-output", "--timeout", "9"),
        mpi_local_args=("-x", "A=1"),
        allow_run_as_root=True,
        forwarded=("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"),
    )
    assert words == [
        "/opt/mpirun",
        *("--tag-output", "--bind-to", "none", "--oversubscribe"),
        *("--mca", "async_mpi_finalize", "1", "--mca", "osc", "^ucx"),
        *("--tag-output", "--timeout", "9"),
        "--allow-run-as-root",
        *("-np", "1"),
        *("-x", "POPDIST_NUM_TOTAL_REPLICAS=4"),
        *("-x", "POPDIST_NUM_IPUS_PER_REPLICA=2"),
        *("-x", "POPDIST_NUM_LOCAL_REPLICAS=4"),
        *("-x", "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=1"),
        *("-x", "POPDIST_REPLICA_INDEX_OFFSET=0"),
        *("-x", "POPDIST_LOCAL_INSTANCE_INDEX=0"),
        *("-x", "RANK=0", "-x", "WORLD_SIZE=1", "-x", "LOCAL_RANK=0", "-x", "LOCAL_WORLD_SIZE=1"),
        *("-x", "GROUP_RANK=0", "-x", "NODE_RANK=0"),
        *("-x", "PJRT_NPROC=8"),
        *("-x", "PATH", "-x", "LD_LIBRARY_PATH", "-x", "PYTHONPATH", "-x", "POPRUN_CONTROL"),
        *("-x", "A=1"),
        *("/opt/python", "-I", "-S", str(AGENT), "any"),
        *("python3", "train.py", "+--lr=0.1"),
    ]


def contexts(words: list[str]) -> list[list[str]]:
    """Return the application contexts, each from its `-np` on."""
    found: list[list[str]] = [[]]
    for word in words[words.index("-np") :]:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
    return found


def user_part(context: list[str]) -> list[str]:
    """Return the words of a context between poprun's own options and the agent."""
    return context[context.index("POPRUN_CONTROL") + 1 : context.index("/opt/python")]


def test_every_instance_has_a_context_with_its_own_offset_cores_and_the_local_arguments():
    found = contexts(command(num_instances=2, num_replicas=6, mpi_local_args=("-x", "A=1")))
    assert len(found) == 2
    for index, words in enumerate(found):
        assert words[:2] == ["-np", "1"]
        assert f"POPDIST_REPLICA_INDEX_OFFSET={3 * index}" in words
        assert f"POPDIST_LOCAL_INSTANCE_INDEX={index}" in words
        assert words[words.index(str(AGENT)) + 1] == str(index)
        assert "A=1" in words


def test_global_arguments_come_once():
    words = command(**TWO, mpi_global_args=("--timeout", "9"))
    assert words.count("--timeout") == 1
    assert words.index("--timeout") < words.index("-np")


def test_binding_is_left_to_the_users_arguments():
    words = command(**TWO, mpi_global_args=("--bind-to", "core"))
    assert words.count("--bind-to") == 1
    assert "none" not in words


@pytest.mark.parametrize(("instances", "yields"), [(2, False), (3, True)])
def test_instances_yield_while_they_wait_if_they_outnumber_the_cores(instances, yields):
    words = command(num_instances=instances, num_replicas=instances)
    assert ("mpi_yield_when_idle" in words) == yields


def test_mca_parameters_of_the_user_are_not_set_again():
    words = command(mpi_global_args=("--mca", "osc", "sm", "--mca", "async_mpi_finalize", "0"))
    assert words.count("osc") == words.count("async_mpi_finalize") == 1


@pytest.mark.parametrize(
    ("shares", "cores", "options", "facts", "way_out"),
    [
        ({"h": 8}, {"h": 2}, {}, "8 instances on 2 cores of h", "--num-instances 2 --num-replicas 8"),
        (
            {"h": 6},
            {"h": 5},
            {"num_replicas": 12},
            "6 instances on 5 cores of h",
            "--num-instances 4 --num-replicas 12",
        ),
        ({"h": 2, "i": 2}, {"h": 1, "i": 4}, {}, "2 instances on 1 core of h", "--num-instances 2 --num-replicas 4"),
        (
            {"h": 3, "i": 3},
            {"h": 1, "i": 4},
            {"num_replicas": 12},
            "3 instances on 1 core of h",
            "--num-instances 2 --num-replicas 12",
        ),
        (
            {"h": 3, "i": 3},
            {"h": 2, "i": 1},
            {},
            "3 instances on 2 cores of h, 3 instances on 1 core of i",
            "--num-instances 2 --num-replicas 6",
        ),
        ({"h": 7, "i": 7, "j": 7}, {"i": 1}, {}, "7 instances on 1 core of i", "--num-instances 3 --num-replicas 21"),
    ],
)
def test_more_instances_than_cores_are_named_with_a_number_that_fits(shares, cores, options, facts, way_out):
    said = launch_on(shares, cores, **options).crowding
    assert said.startswith(f"{facts}: instances that share a core ")
    assert f"; use {way_out}, which " in said


@pytest.mark.parametrize(
    ("shares", "cores", "options"),
    [
        ({"h": 2}, {"h": 2}, {}),
        ({"h": 2}, {"h": 2}, {"spares": 2, "on_failure": "replace"}),
        ({"h": 8}, {}, {}),
        ({"h": 8}, {"h": 2}, {"mpi_global_args": ("--oversubscribe",)}),
    ],
)
def test_enough_cores_and_what_the_user_asks_for_need_no_warning(shares, cores, options):
    assert launch_on(shares, cores, **options).crowding == ""


def launch_on(shares, cores, **options):
    """Return a launch with so many instances on each host, which has so many cores; its spares are on the last one."""
    count = sum(shares.values())
    settings = LaunchSettings(("p",), **{"num_instances": count, "num_replicas": count, **options})
    known = {host: [Core(0, 0, number, number) for number in range(cores.get(host, 1))] for host in shares}
    spares = (0,) * (len(shares) - 1) + (settings.spares,)
    places = place_instances(settings, list(shares), known, (), tuple(shares.values()), spares)
    hosts = tuple(Host(host) for host in shares)
    return Launch(settings, hosts, places, "/mpirun", "/python", {}, (), oversubscribes=True, cores=cores)


def test_root_is_allowed_once():
    words = command(allow_run_as_root=True, mpi_global_args=("--allow-run-as-root",))
    assert words.count("--allow-run-as-root") == 1


class TestExtraVariables:
    def test_python_is_unbuffered_and_the_pool_is_fixed(self):
        extra = extra_variables(LaunchSettings(program=("p",)), {"PJRT_NPROC": "8"}, {})
        assert extra == {"PJRT_NPROC": "8", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}

    def test_the_users_environment_comes_first(self):
        users = {"PYTHONUNBUFFERED": "", "PYTHONHASHSEED": "random"}
        assert extra_variables(LaunchSettings(program=("p",)), {}, users) == {}

    def test_an_exported_hash_seed_stays(self):
        exported = LaunchSettings(program=("p",), mpi_global_args=("-x", "PYTHONHASHSEED=7"))
        assert "PYTHONHASHSEED" not in extra_variables(exported, {}, {})

    def test_offline_mode_wins_over_the_environment_but_not_over_an_export(self):
        offline = LaunchSettings(program=("p",), offline_mode=True)
        assert extra_variables(offline, {}, {"JAX_PLATFORMS": "gpu"})["JAX_PLATFORMS"] == "cpu"
        told = LaunchSettings(program=("p",), offline_mode=True, mpi_local_args=("-x", "JAX_PLATFORMS=tpu"))
        assert "JAX_PLATFORMS" not in extra_variables(told, {}, {})


def test_no_host_option_is_given_for_a_job_on_this_machine():
    assert "--host" not in command(**TWO)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["here", "b"]])
def test_every_context_names_its_host_if_one_host_is_remote(names):
    hosts = tuple(Host(name, is_this_machine=name == "here") for name in names)
    found = contexts(command(num_instances=4, num_replicas=4, hosts=hosts))
    share = 4 // len(names)
    assert [words[2:4] for words in found] == [["--host", f"{name}:{share}"] for name in names for _ in range(share)]


def test_the_local_index_begins_anew_on_each_host():
    found = contexts(command(num_instances=4, num_replicas=4, hosts=(Host("a"), Host("b"))))
    assert [[word for word in words if "LOCAL_INSTANCE" in word][0][-1] for words in found] == ["0", "1", "0", "1"]


def test_arguments_of_one_instance_follow_those_of_all():
    own = ((1, ("-x", "A=2", "--mca", "x", "y")), (1, ("-x", "B")))
    first, second = contexts(command(**TWO, mpi_local_args=("-x", "A=1"), instance_mpi_local_args=own))
    assert user_part(first) == ["-x", "A=1"]
    assert user_part(second) == ["-x", "A=2", "-x", "B", "--mca", "x", "y"]


class TestExportsOfTheSameVariable:
    """mpirun itself takes the first export, and gives the exports of the first context to all others."""

    def test_an_export_for_one_instance_takes_the_place_of_the_general_one(self):
        words = command(
            num_instances=2,
            num_replicas=2,
            mpi_global_args=("-x", "A=1", "--timeout", "9", "-x", "B=1"),
            instance_mpi_local_args=((1, ("-x", "A=2")),),
        )
        assert [word for word in words if word[:2] in ("A=", "B=")] == ["B=1", "A=1", "A=2"]
        assert words.index("B=1") < words.index("-np") < words.index("A=1")

    def test_an_exported_value_takes_the_place_of_a_forwarded_variable(self):
        for option in ("mpi_global_args", "mpi_local_args"):
            words = command(forwarded=("PATH", "PYTHONPATH"), **{option: ("-x", "PATH=/bin")})
            assert [word for word in words if "PATH" in word] in (
                ["PATH=/bin", "PYTHONPATH"],
                ["PYTHONPATH", "PATH=/bin"],
            )

    def test_variables_that_describe_an_instance_are_never_taken_from_the_user(self):
        for option in ("mpi_global_args", "mpi_local_args"):
            words = command(**{option: ("-x", "POPDIST_NUM_TOTAL_REPLICAS=7")})
            assert [word for word in words if "TOTAL" in word] == ["POPDIST_NUM_TOTAL_REPLICAS=1"]

    def test_exports_of_the_first_instance_alone_bypass_mpirun(self):
        own = ((0, ("-x", "A=1", "-x", "B=1")), (1, ("-x", "B=2")))
        first, second = contexts(command(**TWO, instance_mpi_local_args=own))
        assert user_part(first) == ["-x", "B=1", "/usr/bin/env", "A=1"]
        assert user_part(second) == ["-x", "B=2"]


def test_a_variable_exported_for_one_instance_is_not_set_by_poprun_for_it():
    own = ((0, ("-x", "PJRT_NPROC=3")),)
    first, second = contexts(command(**TWO, instance_mpi_local_args=own))
    assert [word for word in first if "PJRT" in word] == ["PJRT_NPROC=3"]
    assert [word for word in second if "PJRT" in word] == ["PJRT_NPROC=8"]


def test_cache_path_and_device_are_exported_when_they_are_known():
    assert not [word for word in command() if "CACHE" in word or "DEVICE" in word]
    words = command(executable_cache_path="/tmp/c d", devices=(24,))
    assert "POPDIST_EXECUTABLE_CACHE_PATH=/tmp/c d" in words
    assert "POPDIST_DEVICE_ID=24" in words


def following(words: list[str], word: str) -> list[str]:
    """Return the words behind each occurrence of a word."""
    return [after for before, after in zip(words, words[1:], strict=False) if before == word]


def test_only_jobs_that_shrink_have_open_mpi_tolerate_faults():
    words = pair(on_failure="shrink")
    assert following(words, "--with-ft") == ["ulfm"]
    assert words.count("POPDIST_SHRINKS=1") == 2
    assert following(pair(on_failure="shrink", mpi_global_args=("--with-ft", "mpi")), "--with-ft") == ["mpi"]
    for on_failure in ("stop", "restart"):
        words = pair(on_failure=on_failure)
        assert "--with-ft" not in words
        assert not [word for word in words if "SHRINKS" in word]


def test_root_is_allowed_only_on_request():
    assert "--allow-run-as-root" in pair(allow_run_as_root=True)
    assert "--allow-run-as-root" not in pair()


def test_the_partition_is_exported_to_programs_that_use_it():
    words = pair(vipu_partition="p1", devices=(4, 5))
    assert [word for word in words if "PARTITION" in word] == ["IPUOF_VIPU_API_PARTITION_ID=p1"] * 2
    assert not [word for word in pair() if "PARTITION" in word]
    assert not [word for word in pair(vipu_partition="p1", offline_mode=True) if "PARTITION" in word]


def test_remote_hosts_are_reached_over_one_network_with_the_ssh_options():
    words = pair(BOTH, REMOTE)
    assert following(words, "plm_ssh_args") == ["-o BatchMode=yes"]
    assert following(words, "prte_if_include") == following(words, "btl_tcp_if_include") == ["10.0.0.0/24"]
    assert following(words, "--host") == ["h:1", "other:1"]
    assert "plm_ssh_args" not in pair()


def test_injected_faults_reach_every_instance():
    words = pair(inject=("kill:instance=0", "stop:instance=1"))
    assert words.count("POPDIST_INJECT=kill:instance=0;stop:instance=1") == 2
    assert not [word for word in pair() if "INJECT" in word]


def test_each_agent_gets_the_name_of_its_host():
    words = pair(BOTH, replace(REMOTE, names={"h": "h.east", "other": "other.east"}))
    assert [word for word in words if word.startswith("POPRUN_HOST")] == [
        "POPRUN_HOST=h.east",
        "POPRUN_HOST=other.east",
    ]
    for known in ({}, {"h": "h.east"}):  # mpirun gives all what the first context exports
        assert not [word for word in pair(BOTH, replace(REMOTE, names=known)) if "POPRUN_HOST" in word]


def test_timeline_parts_go_into_a_folder_beside_the_timeline():
    folder = f"POPDIST_TIMELINE={Path('a.json.parts').absolute()}"
    words = pair(timeline="a.json", timeline_limit=3)
    assert [word for word in words if "TIMELINE" in word] == [folder, "POPDIST_TIMELINE_LIMIT=3"] * 2
    assert [word for word in pair(timeline="a.json") if "TIMELINE" in word] == [folder] * 2
    assert not [word for word in pair(timeline_limit=3) if "TIMELINE" in word]


def test_the_profile_option_reaches_the_instances_that_record():
    assert "POPDIST_PROFILE=jax:3" in pair(timeline="a.json", profile="jax:3")
    assert not [word for word in pair(timeline="a.json") if "PROFILE" in word]


@pytest.mark.parametrize("word", [*GRAMMAR, "", "+", "++", "+x", "-", " ", "=", "\n"])
def test_a_marked_word_is_restored_by_unmark(word):
    assert mark(word) == f"+{word}"
    assert unmark(mark(word)) == word


@pytest.mark.parametrize("word", ["python3", "./x.py", "/bin/true", "3e-4", "_x", "a:b", "key=--mca", "ü", "\udcff"])
def test_names_numbers_and_paths_are_not_marked(word):
    assert mark(word) == word == unmark(word)


@pytest.mark.parametrize("word", GRAMMAR)
def test_mpirun_never_sees_a_program_word_as_its_own(word):
    plain = command("train", "3", **TWO)
    assert command(word, word, **TWO) == [f"+{word}" if each in ("train", "3") else each for each in plain]
    assert plain.count(":") == 1
    assert plain.count(str(AGENT)) == 2


def test_a_host_is_found_by_the_name_of_its_kernel():
    """Agents report the kernel's name; ssh needs the name that the user wrote."""
    across = Across(others=("pod-0.job", "10.0.0.2", "n1"), names={"pod-0.job": "pod-0", "10.0.0.2": "n2"})
    assert across.others_called({"pod-0", "n2"}) == {"pod-0.job", "10.0.0.2"}
    assert across.others_called({"n1", "elsewhere"}) == {"n1"}
