from __future__ import annotations

import pytest

from poprun.command_line import CommandLine, find_option, read_command_line
from poprun.errors import UsageError
from poprun.options import OPTIONS, Kind, describe_options
from poprun.settings import Settings, settings_from


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


def test_two_dashes_end_the_options_too():
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
def test_verbosity(text, verbosity):
    assert settings_from(read(text)).verbosity == verbosity


@pytest.mark.parametrize("word", ["yes", "on", "true", "1", "YES", "On"])
def test_words_for_yes(word):
    assert read(f"--print-topology {word} p").values == {"print-topology": True}


@pytest.mark.parametrize("word", ["no", "off", "false", "0"])
def test_words_for_no(word):
    assert read(f"--print-topology={word} p").values == {"print-topology": False}


def test_a_flag_needs_no_value_and_may_have_one():
    assert settings_from(read("--dry-run p")).dry_run
    assert not settings_from(read("--dry-run=no p")).dry_run


def test_arguments_for_mpirun_are_split_like_a_shell_does_and_add_up():
    words = ["--mpi-global-args", "--tag-output", "--mpi-global-args=-x A='b, c' --mca x y", "p"]
    settings = settings_from(read_command_line(words))
    assert settings.mpi_global_args == ("--tag-output", "-x", "A=b, c", "--mca", "x", "y")


def test_the_last_of_several_values_holds():
    assert settings_from(read("--num-replicas 2 --num-replicas 4 p")).num_replicas == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--num-replcas 2 p", "unknown option --num-replcas, did you mean --num-replicas"),
        ("--num_instances 2 p", "unknown option --num_instances, did you mean --num-instances"),
        ("--nonsense p", "unknown option --nonsense; poprun --help lists all options"),
        ("-q p", "unknown option -q;"),
        ("--num p", "option --num is ambiguous: --num-replicas or --num-instances; write it in full"),
        ("--num-replicas", "--num-replicas needs a whole number, the command line ends there"),
        ("--num-replicas --num-instances", "--num-replicas needs a whole number, got '--num-instances'"),
        ("--num-replicas 1.5 p", "got '1.5'"),
        ("--offline-mode python", "--offline-mode needs yes or no .*, got 'python'"),
        ("--version-format xml p", "use one of text, json, full-text, full-json"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_a_way_out(text, message):
    with pytest.raises(UsageError, match=message):
        read(text)


def test_an_open_quote_is_refused():
    with pytest.raises(UsageError, match="No closing quotation .*check the quotes"):
        read_command_line(["--mpi-local-args", "-x A='b", "p"])


def test_an_exact_name_wins_over_longer_ones():
    assert find_option("--version").name == "version"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_found_by_all_its_spellings_and_is_in_the_help(option):
    for spelling in (f"--{option.name}", *option.spellings):
        assert find_option(spelling) is option
        assert spelling in describe_options()


def test_the_defaults_in_the_help_are_those_of_the_settings():
    settings = Settings(program=("p",))
    fields = {"print-topology": settings.print_topology, "allow-run-as-root": settings.allow_run_as_root}
    for option in OPTIONS:
        if option.kind is Kind.NUMBER and option.default:
            assert getattr(settings, option.name.replace("-", "_")) == int(option.default)
        if option.name in fields:
            assert fields[option.name] == (option.default == "yes")
    assert settings.process_placement == find_option("--process-placement").default


class TestSettings:
    @pytest.mark.parametrize(
        ("replicas", "instances", "nearest"), [(6, 4, "use 4 or 8 "), (1, 2, "use 2 "), (7, 3, "use 6 or 9 ")]
    )
    def test_replicas_are_divided_evenly_among_instances(self, replicas, instances, nearest):
        with pytest.raises(UsageError, match=nearest):
            Settings(program=("p",), num_replicas=replicas, num_instances=instances)

    @pytest.mark.parametrize("name", ["num_replicas", "num_instances", "ipus_per_replica"])
    @pytest.mark.parametrize("number", [0, -1])
    def test_numbers_are_positive(self, name, number):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is {number}; use 1 or more"):
            Settings(program=("p",), **{name: number})

    @pytest.mark.parametrize("shown", [-1, 2])
    def test_the_instance_that_is_shown_exists(self, shown):
        with pytest.raises(UsageError, match="the job has 2 instances; use 0 to 1"):
            Settings(program=("p",), num_replicas=2, num_instances=2, only_output_from=shown)

    def test_a_program_is_needed(self):
        with pytest.raises(UsageError, match="no program given"):
            settings_from(read("--num-replicas 2"))

    def test_very_verbose_shows_the_topology(self):
        assert settings_from(read("-vv p")).shows_topology
        assert settings_from(read("--print-topology 1 p")).shows_topology
        assert not settings_from(read("-v p")).shows_topology
