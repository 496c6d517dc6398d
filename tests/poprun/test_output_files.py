"""The files that --output-dir keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from poprun.errors import UsageError
from poprun.output.output import Output
from poprun.output.output_files import MERGED, MOST_OPEN, OutputFiles, name_of
from poprun.output.output_style import OutputStyle


def contents(directory: Path) -> dict[str, bytes]:
    """Return the contents of the files that are not empty."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.stat().st_size}


def output_into(directory: Path, only: int | None = None, **style) -> Output:
    return Output(only, OutputStyle(directory=directory, hosts=("node0",) * 3, **style))


class TestNames:
    def test_file_names_sort_like_instances(self):
        assert name_of(3, 1, 8) == "instance-003.stdout"
        for count in (8, 1000, 1001):
            names = [name_of(instance, 2, count) for instance in range(count)]
            assert names == sorted(names)

    def test_every_file_exists_from_the_start(self, tmp_path):
        Output(style=OutputStyle(directory=tmp_path / "a" / "b", hosts=("node0",) * 2))
        assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
            *("instance-000.stderr", "instance-000.stdout", "instance-001.stderr", "instance-001.stdout"),
            MERGED,
        ]


class TestFolders:
    def test_earlier_output_is_never_overwritten(self, tmp_path):
        output_into(tmp_path)
        with pytest.raises(UsageError, match=r"holds the output of an earlier job \(instance-000.stderr\), and poprun"):
            output_into(tmp_path)

    def test_earlier_output_of_other_instances_is_never_mixed_in(self, tmp_path):
        (tmp_path / "instance-007.stdout").touch()
        with pytest.raises(UsageError, match="earlier job"):
            output_into(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1

    def test_unrelated_files_do_not_matter(self, tmp_path):
        (tmp_path / "config.toml").touch()
        (tmp_path / "instance-of-a-class.py").touch()
        output_into(tmp_path)

    def test_an_unusable_folder_is_refused(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
            with pytest.raises(UsageError, match=rf"--output-dir {path} cannot be used: .*; name a folder that you"):
                output_into(path)


class TestContents:
    def test_instance_files_hold_original_bytes_and_the_merged_file_holds_shown_ones(self, tmp_path, capfdbinary):
        output = output_into(tmp_path)
        pieces = [(0, 1, b"\r1 %\r2"), (2, 1, b"a\r\n"), (0, 1, b" %\n\xff"), (1, 2, b"b\n"), (0, 1, b"end")]
        for instance, descriptor, data in pieces:
            output.record(instance, descriptor, data)
            output.show(instance, descriptor, data)
        output.show_own(2, b"own\n")
        output.finish(1.0)
        capfdbinary.readouterr()  # pytest-xdist cannot carry invalid UTF-8
        assert contents(tmp_path) == {
            "instance-000.stdout": b"\r1 %\r2 %\n\xffend",
            "instance-001.stderr": b"b\n",
            "instance-002.stdout": b"a\r\n",
            MERGED: b"[1,0]<stdout>:\r[1,0]<stdout>:1 %\r[1,0]<stdout>:2\n[1,2]<stdout>:a\r\n[1,0]<stdout>: %\n"
            b"[1,0]<stdout>:\xff\n[1,1]<stderr>:b\n[1,0]<stdout>:end\nown\n",
        }

    def test_silenced_instances_are_kept(self, tmp_path, capfdbinary):
        output = output_into(tmp_path, only=0)
        output.record(1, 1, b"quiet\n")
        output.show(1, 1, b"quiet\n")
        output.finish(1.0)
        assert capfdbinary.readouterr() == (b"", b"")
        assert contents(tmp_path) == {"instance-001.stdout": b"quiet\n", MERGED: b"[1,1]<stdout>:quiet\n"}

    def test_output_hidden_after_a_failure_is_kept_per_instance(self, tmp_path):
        output = output_into(tmp_path)
        output.record(1, 2, b"dropped\n")
        output.finish(1.0)
        assert contents(tmp_path) == {"instance-001.stderr": b"dropped\n"}

    def test_clock_and_host_appear_in_the_merged_file_and_colours_in_none(self, tmp_path, capfdbinary):
        output = output_into(tmp_path, tag_host=True, timestamps=True, colours=True)
        output.record(1, 1, b"text\n")
        output.show(1, 1, b"text\n")
        output.finish(1.0)
        kept = contents(tmp_path)
        assert kept["instance-001.stdout"] == b"text\n"
        assert kept[MERGED].partition(b" ")[2] == b"[1,1][node0]<stdout>:text\n"
        assert b"\x1b[" in capfdbinary.readouterr().out

    def test_many_instances_need_few_open_files(self, tmp_path):
        count = MOST_OPEN + 5
        files = OutputFiles(tmp_path, count, pytest.fail)
        for turn in (b"one\n", b"two\n"):
            for instance in range(count):
                files.record(instance, 1, turn)
        assert len(files._open) == MOST_OPEN
        files.close()
        assert set(contents(tmp_path).values()) == {b"one\ntwo\n"}


class TestFullDisk:
    def test_a_write_error_is_reported_once_and_the_job_goes_on(self, tmp_path, capfdbinary):
        output = output_into(tmp_path)
        output.record(0, 1, b"one\n")
        (tmp_path / "instance-001.stdout").unlink()
        (tmp_path / "instance-001.stdout").symlink_to("/dev/full")
        for instance in (1, 1, 0):
            output.record(instance, 1, b"two\n")
            output.show(instance, 1, b"two\n")
        output.finish(1.0)
        out, err = capfdbinary.readouterr()
        assert out == b"[1,1]<stdout>:two\n" * 2 + b"[1,0]<stdout>:two\n"
        (warning,) = err.decode().splitlines()
        assert warning.partition(" POPRUN ")[2] == (
            f"[W] cannot write {tmp_path}/instance-001.stdout: No space left on device; "
            f"the job goes on, but no more of its output is kept in {tmp_path}"
        )
        assert contents(tmp_path) == {"instance-000.stdout": b"one\n"}
