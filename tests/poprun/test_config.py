from __future__ import annotations

import os
import tomllib

import pytest

from poprun.cli.command_line import CommandLine, read_command_line, settings_from
from poprun.cli.config import export_config, format_config, import_config, merge, parse_config
from poprun.cli.launch_options import OPTIONS
from poprun.cli.options import OptionKind
from poprun.errors import UsageError

EVERYTHING = [
    *("-v", "--vv", "-H", "node[00-03],b", "--num-replicas", "8", "--num-instances=4", "--ipus-per-replica", "2"),
    *("--num-ilds=2", "--print-topology", "off", "--vipu-partition", "p", "--reset-partition=no"),
    *("--mpi-global-args", "--tag-output -x 'A=b \"c\"'", "--mpi-local-args=-x B='ü\\n\t'", "--mpi-local-args", "-x C"),
    *("--instance-mpi-local-args", "1:\"-x D='e f'\"", "--instance-mpi-local-args", "0:-x E"),
    *("--process-placement", "cores", "--host-subnet", "10.0.0.0/16", "--output-dir", "out put", "--timestamps"),
    *("--", "python", "train.py", "--lr=0.1", "", "a 'b' \"c\"\n", "--num-replicas"),
]


def test_all_options_survive_format_and_parse():
    line = read_command_line(EVERYTHING)
    assert parse_config(format_config(line), "f") == line


@pytest.mark.parametrize("text", [".00001", "0.25", "7.0", "9", "1.5e-07"])
def test_seconds_survive_format_and_parse(text):
    line = read_command_line([f"--restart-backoff-s={text}", "p"])
    (seconds,) = line.values.values()
    (read,) = parse_config(format_config(line), "f").values.values()
    assert (read, type(read)) == (seconds, type(seconds))


def test_export_import_export_writes_the_same_file(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    export_config(read_command_line(["--export-config", str(first), *EVERYTHING]))
    export_config(import_config(read_command_line(["--import-config", str(first), "--export-config", str(second)])))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.once], ids=lambda option: option.name)
def test_each_option_alone_survives_format_and_parse(option):
    examples = {
        OptionKind.FLAG: (True, False),
        OptionKind.BOOLEAN: (True, False),
        OptionKind.NUMBER: (1, 7),
        OptionKind.INSTANCES: (1, "2:3"),
        OptionKind.SECONDS: (1, 7.25, 1e-9 + 2),
        OptionKind.TEXT: ("word", "zwölf"),
        OptionKind.PATH: ("a/b", "c d"),
        OptionKind.HOSTS: (("a",), ("a[0-1],b", "c")),
        OptionKind.METRICS: (("csv:a.csv",), ("mlflow", "csv:a,jsonl:b")),
        OptionKind.FAULT: (("kill:instance=0",), ("stop:instance=0,step=2", "exit:instance=1")),
        OptionKind.ARGUMENTS: ((), ("-x", "A= b")),
        OptionKind.INSTANCE_ARGUMENTS: (("0:-x A",), ("0:\"-x A='b c'\"", "1:")),
    }
    for value in option.choices or examples[option.kind]:
        line = CommandLine({option.name: value})
        assert parse_config(format_config(line), "f") == line


def test_the_file_resembles_the_command_line():
    line = read_command_line(
        ["--offline-mode", "yes", "--num-replicas", "4", "--mpi-local-args=-x A", "python", "x.py"]
    )
    assert format_config(line) == (
        'num-replicas = 4\nmpi-local-args = [\n    "-x",\n    "A",\n]\noffline-mode = true\n'
        'program = [\n    "python",\n    "x.py",\n]\n'
    )


def test_defaults_and_options_of_a_single_call_are_not_written():
    once = ["--dry-run", "--json", "--export-config", "f", "--overwrite-config", "yes", "--import-config", "g"]
    assert tomllib.loads(format_config(read_command_line([*once, "--version-format", "json", "p"]))) == {
        "program": ["p"]
    }


def test_values_are_parsed_like_words_of_a_command_line():
    text = 'host = "a,b"\nnum-instances = "2"\nprint-topology = "on"\nmpi-global-args = "-x A=\'b c\'"\noffline-mode=0'
    line = parse_config(text, "f")
    assert line.values == {
        "host": ("a,b",),
        "num-instances": 2,
        "print-topology": True,
        "mpi-global-args": ("-x", "A=b c"),
        "offline-mode": False,
    }


class TestMerge:
    def test_the_command_line_wins_option_by_option(self):
        imported = CommandLine({"num-replicas": 4, "offline-mode": True, "mpi-local-args": ("-x", "A")}, ("p", "1"))
        given = CommandLine({"offline-mode": False, "mpi-local-args": ("-x", "B")})
        assert merge(given, imported) == CommandLine(
            {"num-replicas": 4, "offline-mode": False, "mpi-local-args": ("-x", "B")}, ("p", "1")
        )

    def test_a_program_on_the_command_line_wins(self):
        assert merge(CommandLine({}, ("q",)), CommandLine({}, ("p", "1"))).program == ("q",)

    @pytest.mark.parametrize(
        ("given", "imported", "expected"),
        [
            ({"num-instances": "4:6"}, {"spares": 1}, {"num-instances": "4:6"}),
            ({"num-instances": 3}, {"spares": 1}, {"num-instances": 3, "spares": 1}),
            ({"num-instances": 3}, {"num-instances": "4:6"}, {"num-instances": 3}),
            ({"spares": 1}, {"num-instances": "4:6"}, {"num-instances": 4, "spares": 1}),
            ({"spares": 1}, {"num-instances": 4}, {"num-instances": 4, "spares": 1}),
        ],
    )
    def test_spares_on_the_command_line_replace_the_spares_of_the_file(self, given, imported, expected):
        assert merge(CommandLine(given), CommandLine(imported)).values == expected

    @pytest.mark.parametrize(("given", "imported"), [("host", "hostfile"), ("hostfile", "host")])
    def test_hosts_on_the_command_line_replace_the_hosts_of_the_file(self, given, imported):
        values = {"host": ("a",), "hostfile": "f"}
        merged = merge(CommandLine({given: values[given]}), CommandLine({imported: values[imported]}))
        assert set(merged.values) == {given}


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("num-replicas =", "configuration f is not TOML"),
            ("num-replcas = 4", "has an unknown key num-replcas, did you mean num-replicas"),
            ("num_replicas = 4", "has an unknown key num_replicas, did you mean num-replicas"),
            ("prorgam = ['p']", "has an unknown key prorgam, did you mean program"),
            ("xyzzy = 4", "has an unknown key xyzzy; poprun --help-all lists all options"),
            ("dry-run = true", "dry-run applies to a single call of poprun; give it on the command line"),
            ("import-config = 'g'", "import-config applies to a single call of poprun"),
            ("num-replicas = 1.5", "configuration f: --num-replicas needs a whole number, got '1.5'"),
            ("num-replicas = true", "--num-replicas needs a whole number, got 'True'"),
            ("stuck-timeout-s = nan", "--stuck-timeout-s needs a number of seconds, got 'nan'"),
            ("stuck-timeout-s = -0.5", "--stuck-timeout-s is -0.5; use 0 or more"),
            ("stuck-timeout-s = true", "--stuck-timeout-s needs a number of seconds, got 'True'"),
            ("num-replicas = 0", "--num-replicas is 0; use 1 or more"),
            ("num-replicas = 'two'", "--num-replicas needs a whole number, got 'two'"),
            ("offline-mode = 2", "--offline-mode needs yes or no .*, got '2'"),
            ("host-subnet = ''", "--host-subnet is empty"),
            ("process-placement = 'sideways'", "use one of spreadnuma"),
            ("host = [1]", r"--host needs a list of hosts .*, got \[1\]"),
            ("instance-mpi-local-args = ['x']", "write the index of the instance first"),
            ('mpi-local-args = "-x \'A"', "check the quotes"),
            ("program = 'p'", "program is not a list of words"),
            ("program = [1]", "program is not a list of words"),
            ("[topology]\nnum-replicas = 4", "has an unknown key topology"),
        ],
    )
    def test_an_invalid_configuration_is_refused(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_config(text, "f")

    def test_a_missing_file_is_refused(self, tmp_path):
        with pytest.raises(
            UsageError, match="none.toml cannot be read: No such file or directory; check --import-config"
        ):
            import_config(read_command_line(["--import-config", str(tmp_path / "none.toml"), "p"]))

    def test_a_binary_file_is_refused(self, tmp_path):
        (tmp_path / "f").write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match="is not a text file"):
            import_config(read_command_line(["--import-config", str(tmp_path / "f"), "p"]))

    def test_an_existing_file_is_overwritten_only_on_request(self, tmp_path):
        file = tmp_path / "f.toml"
        file.write_text("mine")
        with pytest.raises(UsageError, match="f.toml exists; give --overwrite-config yes, or another name"):
            export_config(read_command_line(["--export-config", str(file), "p"]))
        assert file.read_text() == "mine"
        export_config(read_command_line(["--export-config", str(file), "--overwrite-config", "yes", "p"]))
        assert file.read_text() == format_config(CommandLine({}, ("p",)))

    def test_a_missing_directory_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="cannot be written: No such file or directory; check --export-config"):
            export_config(read_command_line(["--export-config", str(tmp_path / "none" / "f"), "p"]))

    def test_words_that_toml_cannot_hold_create_no_file(self, tmp_path):
        with pytest.raises(UsageError, match="not valid UTF-8"):
            export_config(CommandLine({"export-config": str(tmp_path / "f")}, ("p", "\udcff")))
        assert list(tmp_path.iterdir()) == []


def test_import_and_export_do_nothing_without_their_options():
    line = read_command_line(["p"])
    assert import_config(line) is line
    assert export_config(line) is None


def test_an_imported_file_suffices_to_start_its_program(tmp_path):
    (tmp_path / "f").write_text('num-replicas = 2\nprogram = ["p", "--x"]')
    settings = settings_from(import_config(read_command_line(["--import-config", str(tmp_path / "f")])))
    assert (settings.program, settings.num_replicas) == (("p", "--x"), 2)


class TestOwnershipAndMode:
    """A configuration decides which program runs with all rights of the user."""

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "job.toml"
        path.write_text('program = ["true"]\n')
        return path

    def test_a_file_writable_by_others_is_refused_with_the_way_out(self, path):
        path.chmod(0o666)
        with pytest.raises(
            UsageError, match=rf"{path} controls which program poprun runs, but others can write .*0666.*chmod go-w"
        ):
            import_config(CommandLine({"import-config": str(path)}))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_file_of_another_user_is_refused_with_the_way_out(self, path):
        os.chown(path, 65534, 65534)
        with pytest.raises(UsageError, match="belongs to user 65534, and this is user 0; .* copy it"):
            import_config(CommandLine({"import-config": str(path)}))

    def test_a_pipe_is_accepted(self):
        reading, writing = os.pipe()
        os.write(writing, b'program = ["true"]\n')
        os.close(writing)
        line = import_config(CommandLine({"import-config": f"/dev/fd/{reading}"}))
        os.close(reading)
        assert line.program == ("true",)

    @pytest.mark.parametrize("mode", [None, 0o666])
    def test_an_exported_file_is_not_writable_by_others(self, tmp_path, mode):
        path = tmp_path / "written.toml"
        if mode is not None:
            path.touch()
            path.chmod(mode)
        before = os.umask(0)
        try:
            export_config(CommandLine({"export-config": str(path), "overwrite-config": True}, ("true",)))
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o644
        assert import_config(CommandLine({"import-config": str(path)})).program == ("true",)
