from __future__ import annotations

import os
from dataclasses import replace

import pytest

from poprun.cli.command_line import CommandLine, find_option, read_command_line, read_instance_arguments, settings_from
from poprun.cli.help import describe_options
from poprun.cli.launch_options import ACCEPTED, OPTIONS, VIPU
from poprun.cli.options import OptionKind
from poprun.cli.settings import LaunchSettings, note_without_effect, warn_of_deprecated
from poprun.errors import UsageError
from poprun.launch.program import COMMANDS


def read(text: str) -> CommandLine:
    return read_command_line(text.split())


@pytest.mark.parametrize(
    "text", ["--num-replicas 4 prog", "--num-replicas=4 prog", "--num-rep 4 prog", "--num-r=4 prog"]
)
def test_a_value_follows_as_a_word_or_after_an_equals_sign(text):
    assert read(text) == CommandLine({"num-replicas": 4}, ("prog",))


def test_options_end_at_the_first_other_word():
    line = read("-v python -v --num-replicas 4 --help")
    assert line.values == {"verbose": True}
    assert line.program == ("python", "-v", "--num-replicas", "4", "--help")


def test_two_dashes_end_the_options():
    assert read("--num-replicas 2 -- --odd-program -v").program == ("--odd-program", "-v")


@pytest.mark.parametrize(
    ("text", "verbosity"),
    [
        ("p", 0),
        ("-v p", 1),
        ("--verbose p", 1),
        ("-vv p", 2),
        ("--vv p", 2),
        ("-v -vv p", 2),
        ("--verb p", 1),
    ],
)
def test_v_and_vv_set_the_verbosity(text, verbosity):
    assert settings_from(read(text)).verbosity == verbosity


@pytest.mark.parametrize("word", ["yes", "on", "true", "1", "YES", "On"])
def test_words_for_yes_set_an_option(word):
    assert read(f"--print-topology {word} p").values == {"print-topology": True}


@pytest.mark.parametrize("word", ["no", "off", "false", "0"])
def test_words_for_no_unset_an_option(word):
    assert read(f"--print-topology={word} p").values == {"print-topology": False}


def test_a_flag_accepts_an_optional_value():
    assert settings_from(read("--dry-run p")).dry_run
    assert not settings_from(read("--dry-run=no p")).dry_run


def test_mpirun_arguments_are_split_like_shell_words_and_add_up():
    words = ["--mpi-global-args", "--tag-output", "--mpi-global-args=-x A='b, c' --mca x y", "p"]
    settings = settings_from(read_command_line(words))
    assert settings.mpi_global_args == ("--tag-output", "-x", "A=b, c", "--mca", "x", "y")


def test_lists_of_hosts_add_up():
    assert settings_from(read("-H a,b --host c[0-1] p")).host == ("a,b", "c[0-1]")


@pytest.mark.parametrize(
    "text", ["2:-x A=1 -x B='c d'", "2:\"-x A=1 -x B='c d'\"", " 2 : -x A=1 -x 'B=c d'", "2:'-x A=1 -x B=c\\ d'"]
)
def test_arguments_of_one_instance_accept_outer_quotes(text):
    assert read_instance_arguments(text) == (2, ("-x", "A=1", "-x", "B=c d"))


def test_arguments_of_one_instance_accept_an_empty_list_and_a_single_word():
    assert read_instance_arguments("0:") == (0, ())
    assert read_instance_arguments("0:-v") == (0, ("-v",))


def test_a_value_after_an_equals_sign_may_look_like_an_option():
    assert read("--output-dir=--odd p").values == {"output-dir": "--odd"}


def test_seconds_accept_fractions_and_whole_numbers_stay_whole():
    words = "--stuck-timeout-s 2.5 --restart-backoff-s .25 --start-timeout-s 9 --host-timeout-s=10.0 p"
    assert list(read(words).values.items()) == [
        ("stuck-timeout-s", 2.5),
        ("restart-backoff-s", 0.25),
        ("start-timeout-s", 9),
        ("host-timeout-s", 10.0),
    ]
    assert settings_from(read(words)).stuck_timeout_s == 2.5


def test_the_last_of_repeated_values_wins():
    assert settings_from(read("--num-replicas 2 --num-replicas 4 p")).num_replicas == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--num-replcas 2 p", "unknown option --num-replcas, did you mean --num-replicas?"),
        ("--num_instances 2 p", "unknown option --num_instances, did you mean --num-instances"),
        ("--qqqq p", "unknown option --qqqq; poprun --help-all lists all options"),
        ("-q p", "unknown option -q;"),
        ("--n 4 p", "unknown option --n, did you mean --num-instances"),
        ("-c 4 p", "unknown option -c, did you mean --num-instances"),
        ("-m train", r"unknown option -m, which is Python's: write `poprun \[options\] python -m MODULE`"),
        ("-n auto p", f"N instances and M - N spares, got 'auto'; this machine has {os.cpu_count()} cores"),
        ("--standalone p", "--standalone: instances find each other without it; leave it out"),
        ("--rdzv_backend=c10d p", "--rdzv_backend: instances find each other without it; leave it out"),
        ("-n2 p", "unknown option -n2"),
        ("-np2 p", "unknown option -np2"),
        (
            "-n python x.py",
            "--num-instances needs a whole number, or N:M for N instances and M - N spares, got 'python'",
        ),
        ("-n 4: p", "N instances and M - N spares, got ''"),
        ("-n 0:2 p", "--num-instances is 0; use 1 or more"),
        ("-n 6:4 p", "--num-instances is '6:4'; write the number without spares first, such as 4:6"),
        ("-n 2 --spares -1 p", "--spares is -1; use 0 or more"),
        (
            "--nproc-per-node 2 p",
            r"--nproc-per-node; --num-instances \(-n\) counts the processes of all hosts together",
        ),
        ("--nproc_per_node=2 p", r"--nproc_per_node; --num-instances \(-n\) counts"),
        ("--nnodes=2 p", "--nnodes; .*, and --host names the hosts"),
        ("-x A=1 p", "unknown option -x, did you mean --mpi-local-args"),
        (
            "--output-dir --timestamps p",
            "needs a path, got '--timestamps'; write --output-dir=--timestamps if",
        ),
        ("-H --num-instances 2 p", "--host needs a list of hosts .*, got '--num-instances'"),
        ("--vipu-partition -v p", "--vipu-partition needs a word, got '-v'"),
        (
            "--num- p",
            "option --num- is ambiguous: --num-replicas or --num-instances or --num-ilds; write it in full",
        ),
        ("--num-replicas", "--num-replicas needs a whole number, but the command line ends there"),
        ("--num-replicas --num-instances", "--num-replicas needs a whole number, got '--num-instances'"),
        ("--num-replicas 1.5 p", "got '1.5'"),
        ("--num-replicas 1_0 p", "needs a whole number, got '1_0'"),
        (f"--num-replicas {10**26} p", "use at most 1000000"),
        (f"--num-replicas {'9' * 5000} p", "needs a whole number, got '999"),
        (f"--stuck-timeout-s {2**31} p", "use at most 2147483647"),
        ("--vipu-server-port 65536 p", "use at most 65535"),
        ("--offline-mode python", "--offline-mode needs yes or no .*, got 'python'"),
        ("--hots a p", "unknown option --hots, did you mean --host"),
        ("--vipu-partion p p", "unknown option --vipu-partion, did you mean --vipu-partition"),
        ("--stuck-timeout-s soon p", "--stuck-timeout-s needs a number of seconds, got 'soon'"),
        ("--stuck-timeout-s nan p", "needs a number of seconds, got 'nan'"),
        ("--stuck-timeout-s 1e3 p", "needs a number of seconds, got '1e3'"),
        ("--restart-backoff-s -0.5 p", "--restart-backoff-s is -0.5; use 0 or more"),
        ("--host-timeout-s 0.5 p", "--host-timeout-s is 0.5; use 1 or more"),
        (f"--host-timeout-s {'9' * 400}.5 p", "use at most 2147483647"),
        ("--vipu-server-timeout 1.5 p", "needs a whole number, got '1.5'"),
        ("--start-timeout-s 0 p", "--start-timeout-s is 0; use 1 or more"),
        ("--vipu-server-port -1 p", "--vipu-server-port is -1; use 1 or more"),
        ("--output-dir= p", "--output-dir is empty; give it a path"),
        ("--host= p", "--host is empty; give it a list of hosts"),
        ("--instance-mpi-local-args -x p", "write the index of the instance first"),
        ("--instance-mpi-local-args x:-x p", "write the index of the instance first"),
        ("--instance-mpi-local-args 0:'-x p", "check the quotes"),
        ("--version-format xml p", "use one of text, json, full-text, full-json"),
    ],
)
def test_an_invalid_command_line_is_refused_with_a_way_out(text, message):
    with pytest.raises(UsageError, match=message):
        read(text)


@pytest.mark.parametrize("option", ["--mpi-global-args='-x A=1'", "--instance-mpi-local-args=0:'-x A=1' -x B=2"])
def test_an_option_for_mpirun_and_its_value_in_one_word_are_refused(option):
    with pytest.raises(UsageError, match="-args begins with the single word '-x A=1'"):
        settings_from(read_command_line([option, "p"]))


def test_an_open_quote_is_refused():
    with pytest.raises(UsageError, match="No closing quotation .*check the quotes"):
        read_command_line(["--mpi-local-args", "-x A='b", "p"])


def test_an_exact_name_wins_over_longer_ones():
    assert find_option("--version").name == "version"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_found_by_all_its_spellings_and_listed_in_the_help(option):
    for spelling in (f"--{option.name}", *option.spellings):
        assert find_option(spelling) is option
        assert spelling in describe_options(with_rare=True)
        assert option.is_rare or spelling in describe_options()


@pytest.mark.parametrize("columns", [60, 72, 80, 133])
@pytest.mark.parametrize("with_rare", [False, True])
def test_the_help_fits_the_width_of_the_terminal(columns, with_rare):
    lines = describe_options(columns, with_rare).splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)


def test_options_without_effect_appear_only_in_the_full_help():
    for option in OPTIONS:
        assert option.is_rare or not option.is_always_idle
        assert option.section != VIPU or option.is_rare
    assert "port of the server (without effect)" in describe_options(with_rare=True)
    assert "V-IPU" not in describe_options()


def test_the_help_begins_with_an_example():
    commands, usage = describe_options().split("\n\n")[:2]
    missing = [name for name, hint in COMMANDS.items() if not hint and f"\n       poprun {name} " not in commands]
    assert not missing, "a command is missing in the usage"
    example = usage.splitlines()[-1].split()
    assert example[0] == "poprun"
    assert settings_from(read_command_line(example[1:])).replicas_per_instance == 4


@pytest.mark.parametrize("spelling", ["-n", "-np", "--np", "--num-instances"])
def test_spellings_of_other_launchers_are_accepted(spelling):
    for words in ([spelling, "2"], [f"{spelling}=2"]):
        settings = settings_from(read_command_line([*words, "python", "x.py", "-n", "3"]))
        assert (settings.num_instances, settings.num_replicas) == (2, 2)
        assert settings.program == ("python", "x.py", "-n", "3")


EXAMPLES = {
    OptionKind.FLAG: True,
    OptionKind.BOOLEAN: True,
    OptionKind.NUMBER: 1,
    OptionKind.INSTANCES: "2:3",
    OptionKind.SECONDS: 1.5,
    OptionKind.TEXT: "w",
    OptionKind.PATH: "some/path",
    OptionKind.HOSTS: ("a",),
    OptionKind.METRICS: ("csv:run.csv",),
    OptionKind.FAULT: ("kill:instance=0",),
    OptionKind.ARGUMENTS: ("-x", "A"),
    OptionKind.INSTANCE_ARGUMENTS: ("0:-x A",),
}


@pytest.mark.parametrize("option", ACCEPTED, ids=lambda option: option.name)
def test_an_option_without_effect_is_accepted_and_changes_no_setting(option):
    line = CommandLine({option.name: EXAMPLES[option.kind]}, ("p",))
    assert settings_from(line) == settings_from(CommandLine({}, ("p",)))
    (said,) = warn_of_deprecated(line.values) or note_without_effect(line.values, settings_from(line), False)
    assert f"--{option.name}" in said


@pytest.mark.parametrize("option", sorted({*OPTIONS} - {*ACCEPTED}, key=OPTIONS.index), ids=lambda option: option.name)
def test_every_other_option_changes_the_settings(option):
    values = {"num-replicas": 2, "ipus-per-replica": 2}
    value = option.choices[-1] if option.choices else values.get(option.name, EXAMPLES[option.kind])
    own = {
        "json": {"json": True, "dry-run": True},
        "only-output-from-instance": {option.name: 0},
        "summary": {option.name: "json:job.json"},
        "profile": {option.name: "jax:3", "timeline": "a.json"},
        "spares-oversubscribe": {option.name: True, "spares": 1},
    }
    given = own.get(option.name, {option.name: value})
    if option.name in ("num-instances", "min-instances"):
        given = {"num-instances": 2, "num-replicas": 2} | {option.name: 2}
    without = {name: value for name, value in given.items() if name != option.name}
    assert settings_from(CommandLine(given, ("p",))) != settings_from(CommandLine(without, ("p",)))


class TestSpares:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("-n 4:6 --spares 1 p", "--num-instances 4:6 starts 2 spares, but --spares is 1; give one of them"),
            ("-n 2 --on-failure replace p", "--on-failure is replace, but the job has no spares; use --spares N, or"),
            ("-n 2:3 --on-failure stop p", "--on-failure is stop, so 1 spare would never take a place"),
            ("-n 2:3 --on-failure restart p", "--on-failure is restart, so 1 spare would never take a place"),
            ("-n 2:4 --inject kill:instance=4 p", "but the job has 2 instances and 2 spares; use 0 to 3"),
            ("-n 2:4 --min-instances 3 p", "--min-instances is 3, but the job has 2 instances; use at most 2"),
        ],
    )
    def test_impossible_spares_are_refused_with_a_way_out(self, words, message):
        with pytest.raises(UsageError) as refused:
            settings_from(read_command_line(words.split()))
        assert message in str(refused.value)

    @pytest.mark.parametrize("words", ["-n 4:6", "-n 4 --spares 2", "-n 4:6 --spares 2", "-n=4:6 --on-failure replace"])
    def test_spares_are_asked_for_in_two_ways(self, words):
        settings = settings_from(read_command_line([*words.split(), "p"]))
        assert (settings.num_instances, settings.spares, settings.num_processes) == (4, 2, 6)
        assert (settings.num_replicas, settings.on_failure, settings.carries_on) == (4, "replace", True)

    @pytest.mark.parametrize("words", ["-n 4", "-n 4:4", "-n 4 --spares 0"])
    def test_a_job_without_spares_stops_after_a_failure(self, words):
        settings = settings_from(read_command_line([*words.split(), "p"]))
        assert (settings.num_processes, settings.on_failure, settings.carries_on) == (4, "stop", False)

    def test_shrink_with_spares_means_the_same_as_replace(self):
        shrink = settings_from(read_command_line(["-n=2:3", "--on-failure=shrink", "p"]))
        assert shrink == replace(settings_from(read_command_line(["-n=2:3", "p"])), on_failure="shrink")
        assert shrink.carries_on

    def test_options_may_name_spares(self):
        words = ["--inject=kill:instance=2", "--only-output-from-instance=2", "--instance-mpi-local-args=2:-x A=1"]
        settings = settings_from(read_command_line(["-n=2:3", *words, "p"]))
        assert [dict(each.exports) for each in settings.mpi.instances] == [{}, {}, {"A": "1"}]


class TestSettings:
    @pytest.mark.parametrize(
        ("profile", "timeline", "why"),
        [
            ("jx", "a.json", "--profile 'jx' names no profile; write jax or torch"),
            ("jax:0", "a.json", "--profile 'jax:0' asks for 0 steps, but a profile has at least 1; write a number"),
            ("jax", None, "--profile is given without --timeline, and a profile is a part of a timeline; give both"),
        ],
    )
    def test_a_profile_needs_a_timeline_and_a_known_profiler(self, profile, timeline, why):
        with pytest.raises(UsageError, match=why):
            LaunchSettings(program=("p",), profile=profile, timeline=timeline)

    @pytest.mark.parametrize(
        ("replicas", "instances", "nearest"), [(6, 4, "use 4 or 8 "), (1, 2, "use 2 "), (7, 3, "use 6 or 9 ")]
    )
    def test_replicas_are_divided_evenly_among_instances(self, replicas, instances, nearest):
        with pytest.raises(UsageError, match=nearest):
            LaunchSettings(program=("p",), num_replicas=replicas, num_instances=instances)

    @pytest.mark.parametrize("name", ["num_replicas", "num_instances", "ipus_per_replica"])
    @pytest.mark.parametrize("number", [0, -1])
    def test_numbers_are_positive(self, name, number):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is {number}; use 1 or more"):
            LaunchSettings(program=("p",), **{name: number})

    @pytest.mark.parametrize("shown", [-1, 2])
    def test_the_only_instance_shown_must_exist(self, shown):
        with pytest.raises(UsageError, match="the job has 2 instances; use 0 to 1"):
            LaunchSettings(program=("p",), num_replicas=2, num_instances=2, only_output_from_instance=shown)

    def test_the_default_number_of_replicas_is_one_per_instance(self):
        assert settings_from(read("--num-instances 3 p")).num_replicas == 3
        assert settings_from(read("p")).num_replicas == 1
        assert settings_from(read("--num-replicas 4 p")).num_instances == 1
        with pytest.raises(UsageError, match="asked for 1 replica on 2 instances"):
            settings_from(read("--num-instances 2 --num-replicas 1 p"))

    def test_a_program_is_needed(self):
        with pytest.raises(UsageError, match="no program given"):
            settings_from(read("--num-replicas 2"))

    def test_very_verbose_prints_the_topology(self):
        assert settings_from(read("-vv p")).shows_topology
        assert settings_from(read("--print-topology 1 p")).shows_topology
        assert not settings_from(read("-v p")).shows_topology

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"host": ("a",), "hostfile": "f"}, "--host and --hostfile are both given"),
            ({"no_tags": True, "tag_host": True}, "--no-tags and --tag-host are both given"),
            ({"json": True}, "--json is given without --dry-run"),
            ({"num_ilds": 0}, "--num-ilds is 0; use 1 or more"),
            ({"num_ilds": 2}, "asked for 1 instance on 2 ILDs; instances must divide evenly: use 2 "),
            ({"num_ilds": 2, "num_instances": 3, "num_replicas": 3}, "use 2 or 4 "),
            ({"num_ilds": 1, "num_replicas": 17, "ipus_per_replica": 4}, r"68 IPUs \(17 replicas x 4\) in 1 ILD"),
            ({"num_ilds": 1, "num_replicas": 65}, r"an ILD has at most 64: use 2 or more \(--num-ilds\)"),
            ({"vipu_partition": "p", "num_replicas": 128}, "asked for 1 instance on 2 ILDs"),
            ({"inject": ("kill:instance=1",)}, "the job has 1 instance; use 0$"),
            ({"min_instances": 2}, "--min-instances is 2, but the job has 1 instance; use at most 1"),
            ({"instance_mpi_local_args": ((1, ()),)}, "names instance 1, but the job has 1 instance; use 0$"),
        ],
    )
    def test_contradictions_are_refused(self, given, message):
        with pytest.raises(UsageError, match=message):
            LaunchSettings(program=("p",), **given)

    @pytest.mark.parametrize(
        ("given", "domains"),
        [
            ({}, 1),
            ({"num_replicas": 1000}, 1),
            ({"num_replicas": 4, "num_instances": 4, "num_ilds": 4}, 4),
            ({"num_replicas": 128, "num_instances": 4, "vipu_partition": "p"}, 2),
            ({"num_replicas": 2, "vipu_partition": "p"}, 1),
            ({"num_replicas": 128, "vipu_partition": "p", "offline_mode": True}, 1),
        ],
    )
    def test_the_partition_sets_the_number_of_ilds_unless_it_is_given(self, given, domains):
        assert LaunchSettings(program=("p",), **given).domains == domains

    def test_debug_means_very_verbose(self):
        assert settings_from(read("--debug p")).verbosity == 2
