"""The copy of a Python environment to other hosts and their answers; this machine plays the hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from poprun.cli.log import Log
from poprun.errors import PopRunError
from poprun.hosts.copying import (
    Copy,
    FolderClaim,
    claim_faults,
    claim_script,
    copy_command,
    copy_fault,
    describe_copy,
    has_lost_reason,
    plan_copies,
    probe_script,
    read_claim,
    release_script,
)
from poprun.hosts.python_environment import MARKER, PythonEnvironment, Tree, describe_environment, digest_tree
from poprun.hosts.ssh import CommandResult
from poprun.hosts.synchronise import synchronise

TOKEN = ".popdist-synchronise-1"
LATE = "took too long"
LIBRARY = Path("/usr/lib/python3")
ENV = PythonEnvironment((Tree(Path("/e")), Tree(Path("/p"), ("a", "b"))), (Path("/usr/bin/python3"),))


def ended(status, err="", out=""):
    return CommandResult(status, out, err, 1.5)


def ask(environment, has_rsync=False):
    """Return the claim of a host, here this machine, and its process."""
    script = claim_script(environment, TOKEN, has_rsync)
    done = subprocess.run(["sh", "-s"], input=script, capture_output=True, text=True, timeout=60, check=False)
    return read_claim(done.stdout, environment), done


@pytest.fixture
def folder(tmp_path):
    """Provide the path of an environment that does not exist yet."""
    return tmp_path / "my env"


@pytest.fixture
def environment(folder):
    return PythonEnvironment((Tree(folder),), ())


class TestEnvironment:
    @pytest.fixture
    def prefix(self, tmp_path):
        (tmp_path / "venv" / "bin").mkdir(parents=True)
        return tmp_path / "venv"

    def test_the_interpreter_behind_a_venv_is_needed(self, prefix):
        (prefix / "bin" / "python3").symlink_to("/usr/bin/python3")
        (prefix / "bin" / "python").symlink_to("python3")
        found = describe_environment(prefix, prefix / "bin" / "python", prefix / "lib", LIBRARY)
        assert found == PythonEnvironment((Tree(prefix),), (Path("/usr/bin/python3"), LIBRARY))

    def test_an_environment_with_its_own_interpreter_needs_nothing_else(self, prefix):
        (prefix / "bin" / "python").touch()
        found = describe_environment(prefix, prefix / "bin" / "python", prefix / "lib", prefix / "lib" / "python3")
        assert found.needed == ()

    def test_packages_outside_the_environment_are_a_separate_tree(self, prefix, tmp_path):
        for name in ("popdist", "poprun", "docs"):
            (tmp_path / "project" / name).mkdir(parents=True)
        found = describe_environment(prefix, prefix / "bin" / "python", tmp_path / "project", LIBRARY)
        assert found.trees == (Tree(prefix), Tree(tmp_path / "project", ("popdist", "poprun")))
        assert found.folders == (prefix, tmp_path / "project" / "popdist", tmp_path / "project" / "poprun")

    @pytest.mark.parametrize("prefix", ["/", "/usr", "/usr/local"])
    def test_the_system_python_is_not_copied(self, prefix):
        with pytest.raises(PopRunError, match=f"the system's own \\({prefix}\\) and is not copied; use a virtual env"):
            describe_environment(Path(prefix), Path("/usr/bin/python3"), Path("/p"), LIBRARY)


class TestDigest:
    @pytest.fixture
    def tree(self, tmp_path):
        (tmp_path / "lib" / "__pycache__").mkdir(parents=True)
        (tmp_path / "lib" / "a.py").write_text("1")
        return tmp_path

    def test_files_that_are_not_copied_do_not_change_the_digest(self, tree):
        before = digest_tree(tree)
        (tree / "lib" / "__pycache__" / "a.pyc").touch()
        (tree / MARKER).write_text(before)
        (tree / TOKEN).mkdir()
        assert digest_tree(tree) == before

    @pytest.mark.parametrize(
        "change",
        [
            lambda tree: (tree / "lib" / "b.py").touch(),
            lambda tree: (tree / "lib" / "a.py").write_text("22"),
            lambda tree: os.utime(tree / "lib" / "a.py", (1, 1)),
            lambda tree: (tree / "lib" / "a.py").chmod(0o755),
            lambda tree: (tree / "lib" / "a.py").rename(tree / "a.py"),
            lambda tree: (tree / "link").symlink_to("lib"),
        ],
    )
    def test_every_change_of_a_copied_file_changes_the_digest(self, tree, change):
        before = digest_tree(tree)
        change(tree)
        assert digest_tree(tree) != before

    def test_a_different_size_changes_the_digest_even_at_the_same_time(self, tree):
        file = tree / "lib" / "a.py"
        before, state = digest_tree(tree), file.stat()
        file.write_text("22")
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert digest_tree(tree) != before


class TestClaim:
    def test_a_missing_folder_is_claimed(self, environment, folder):
        assert ask(environment)[0] == FolderClaim(False, {folder: ""})
        assert sorted(path.name for path in folder.iterdir()) == [TOKEN, MARKER]

    def test_an_empty_folder_is_claimed(self, environment, folder):
        folder.mkdir()
        assert ask(environment)[0] == FolderClaim(False, {folder: ""})

    def test_a_folder_claimed_before_reports_the_digest_of_the_last_tar_copy(self, environment, folder):
        folder.mkdir()
        (folder / "data").touch()
        (folder / MARKER).write_text("abc\n")
        assert ask(environment)[0] == FolderClaim(False, {folder: "abc"})
        assert (folder / MARKER).read_text() == "abc\n"

    def test_rsync_discards_the_digest_of_the_last_tar_copy(self, environment, folder):
        folder.mkdir()
        (folder / MARKER).write_text("abc\n")
        claim = ask(environment, has_rsync=True)[0]
        assert (folder / MARKER).read_text() == ("" if claim.has_rsync else "abc\n")

    def test_a_folder_with_the_token_is_shared(self, environment, folder):
        ask(environment)
        assert ask(environment)[0] == FolderClaim(False, {}, shared=(folder,))

    def test_a_folder_with_other_files_is_refused_and_left_unchanged(self, environment, folder):
        folder.mkdir()
        (folder / "thesis").touch()
        both = PythonEnvironment((Tree(folder.with_name("other")), *environment.trees), ())
        claim, done = ask(both)
        assert claim == FolderClaim(False, {}, foreign=(folder,))
        assert [path.name for path in folder.iterdir()] == ["thesis"]
        assert not folder.with_name("other").exists()
        assert claim_faults("h1", claim, ended(done.returncode), LATE) == [
            f"host h1: {folder} was not made by poprun and is not empty; remove it there if it may be replaced, "
            f"or leave out --synchronise-python-venv"
        ]

    def test_a_file_in_place_of_the_folder_is_refused(self, environment, folder):
        folder.touch()
        assert ask(environment)[0] == FolderClaim(False, {}, foreign=(folder,))

    def test_files_that_the_environment_refers_to_must_exist_on_the_host(self, environment, folder):
        claim, _ = ask(PythonEnvironment(environment.trees, (Path("/"), Path("/no/python3"))))
        assert claim == FolderClaim(False, {}, missing=(Path("/no/python3"),))
        assert not folder.exists()
        assert claim_faults("h1", claim, ended(1), LATE) == [
            "host h1: the Python environment refers to /no/python3, which is missing there; "
            "install the same Python there"
        ]

    def test_a_folder_that_cannot_be_made_gives_no_claim(self, environment, folder):
        folder.parent.joinpath("file").touch()
        claim, done = ask(PythonEnvironment((Tree(folder.parent / "file" / "env"),), ()))
        assert claim is None
        assert "Not a directory" in claim_faults("h1", claim, ended(done.returncode, done.stderr), LATE)[0]

    def test_text_from_a_login_shell_does_no_harm(self):
        said = "Welcome mine 0\npoprun-synchronise mine 0 abc\npoprun-synchronise shared 1\npoprun-synchronise end\n"
        assert read_claim(said, ENV) == FolderClaim(False, {Path("/e"): "abc"}, shared=(Path("/p/a"),))

    @pytest.mark.parametrize("line", ["", "mine", "mine x", "shared 7", "foreign  ", "missing 1e9"])
    def test_an_invalid_answer_gives_no_claim(self, line):
        assert read_claim(f"poprun-synchronise {line}\npoprun-synchronise end\n", ENV) is None

    def test_an_answer_without_its_end_gives_no_claim(self):
        assert read_claim("poprun-synchronise mine 0\n", ENV) is None

    @pytest.mark.parametrize(
        ("status", "complaint", "line"),
        [
            (None, "", "took too long; see what `ssh h1` is busy with"),
            (255, "ssh: connect to host h1 port 22: Connection refused", "Connection refused; start sshd there"),
            (
                1,
                "mkdir: cannot create directory '/e': Permission denied",
                "Permission denied; let the user write there",
            ),
            (1, "touch: cannot touch '/e/x': No space left on device", "device; free some space there"),
            (1, "mkdir: cannot create directory '/e': Read-only file system", "system; use an environment in a folder"),
            (127, "", "exit status 127; try `ssh h1 true` by hand"),
        ],
    )
    def test_a_host_without_an_answer_is_explained(self, status, complaint, line):
        (found,) = claim_faults("h1", None, ended(status, complaint), LATE)
        assert found.startswith("host h1: ")
        assert line in found

    def test_the_release_removes_the_token_and_records_the_digest_of_the_tar_copy(self, environment, folder):
        ask(environment)
        subprocess.run(["sh", "-s"], input=release_script([folder], TOKEN, {folder: "abc"}), text=True, check=True)
        assert [path.name for path in folder.iterdir()] == [MARKER]
        assert ask(environment)[0] == FolderClaim(False, {folder: "abc"})


ODD_NAMES = ["$(touch bad)", "`touch bad`", "it's", 'a "b"', "a  b", "; touch bad;", "-x", "a\\b", "*", "$HOME", "a:b"]
AS_SSH = ("sh", "-c", '[ "$1" != -- ] || shift; shift; exec sh -c "$*"', "ssh")
"""A replacement for ssh: it joins the words after the host for a shell, on this machine."""


@pytest.mark.parametrize("name", ODD_NAMES)
class TestUnusualPaths:
    """Paths that a shell on either side could misread."""

    @pytest.fixture
    def copied(self, name, tmp_path):
        """Provide the path of a copy of a folder with this name, beside its twin on the host."""
        (tmp_path / "here" / name / "lib").mkdir(parents=True)
        (tmp_path / "here" / name / "lib" / name).write_text("data")
        (tmp_path / "there").mkdir()
        return tmp_path / "there" / name

    def run(self, words, tmp_path, **options):
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=os.environ, **options
        )
        assert not (tmp_path / "bad").exists()
        return done

    def test_unusual_paths_are_claimed_and_released(self, name, copied, tmp_path):
        script = claim_script(PythonEnvironment((Tree(copied),), (Path("/"),)), TOKEN, False)
        done = self.run(["sh", "-s"], tmp_path, input=script)
        assert done.stderr == ""
        assert sorted(path.name for path in copied.iterdir()) == [TOKEN, MARKER]
        self.run(["sh", "-s"], tmp_path, input=release_script([copied], TOKEN, {copied: "abc"}))
        assert (copied / MARKER).read_text() == "abc\n"
        assert not (copied / TOKEN).exists()

    @pytest.mark.parametrize("way", ["rsync", "tar"])
    def test_unusual_paths_are_copied(self, name, way, copied, tmp_path):
        if way == "rsync" and shutil.which("rsync") is None:
            pytest.skip("no rsync (apt-get install rsync)")
        copied.mkdir()
        os.rename(tmp_path / "here" / name, tmp_path / "here" / "name")
        moved = Copy("h1", Tree(copied), way == "rsync")
        command = copy_command(moved, AS_SSH)
        target, source = str(copied), str(tmp_path / "here" / "name")
        swap = {target: source, f"{target}/": f"{source}/"}  # on another host, both paths would be the same
        if way == "rsync":
            done = self.run([swap.get(word, word) for word in command.words], tmp_path)
        else:
            with subprocess.Popen(
                [swap.get(word, word) for word in command.feeder], cwd=tmp_path, stdout=subprocess.PIPE
            ) as feeder:
                done = self.run(command.words, tmp_path, stdin=feeder.stdout)
        assert (done.returncode, done.stderr) == (0, "")
        assert (copied / "lib" / name).read_text() == "data"

    def test_unusual_paths_are_probed_without_a_trace(self, name, copied, tmp_path):
        copied.mkdir()
        done = self.run(["sh", "-s"], tmp_path, input=probe_script(Copy("h1", Tree(copied), True), TOKEN))
        assert (done.returncode, done.stderr) == (0, "")
        assert list(copied.iterdir()) == []


def test_the_remote_shell_never_sees_paths_of_rsync():
    assert "s" in copy_command(Copy("h1", Tree(Path("/e")), True), ("ssh",)).words[1]


def test_text_from_a_host_is_one_short_line_without_terminal_controls(capfd):
    said = "warning\n\x1b[2Jrefused" + "x" * 100_000
    (line,) = claim_faults("h1", None, ended(1, said), LATE)
    Log().error(line)
    (shown,) = capfd.readouterr().err.splitlines()
    assert r"host h1: \x1b[2Jrefusedx" in shown
    assert len(shown) < 500


class TestCopies:
    MINE = {Path("/e"): "", Path("/p/b"): "old"}
    DIGESTS = {Path("/e"): "new", Path("/p/b"): "old"}

    def test_rsync_compares_all_folders_that_are_not_shared(self):
        assert plan_copies("h1", FolderClaim(True, self.MINE), ENV, {}) == [
            Copy("h1", Tree(Path("/e")), True),
            Copy("h1", Tree(Path("/p"), ("b",)), True),
        ]

    def test_tar_copies_folders_with_a_different_digest(self):
        assert plan_copies("h1", FolderClaim(False, self.MINE), ENV, self.DIGESTS) == [
            Copy("h1", Tree(Path("/e")), False)
        ]

    def test_shared_folders_are_not_copied(self):
        assert plan_copies("h1", FolderClaim(True, {}, shared=ENV.folders), ENV, {}) == []

    def test_rsync_deletes_only_inside_the_folders(self):
        whole = copy_command(Copy("h1", Tree(Path("/e")), True), ("ssh", "-F", "my file")).words
        assert whole[-3:] == ("--", "/e/", "h1:/e/")
        assert whole[whole.index("-e") + 1] == "ssh -F 'my file'"
        assert f"--exclude={MARKER}" in whole
        parts = copy_command(Copy("h1", Tree(Path("/p"), ("a", "b")), True), ("ssh",)).words
        assert parts[-4:] == ("--", "/p/a", "/p/b", "h1:/p/")

    def test_a_failed_copy_is_explained_by_its_first_known_reason(self):
        said = (
            'rsync: [receiver] write failed on "/e/x": No space left on device (28)\n'
            "rsync error: error in file IO (code 11) at receiver.c(381)\n"
            "rsync: [sender] write error: Broken pipe (32)\n"
        )
        assert copy_fault(Copy("h1", Tree(Path("/e")), True), ended(11, said), LATE) == (
            'host h1: cannot copy /e: rsync: [receiver] write failed on "/e/x": No space left on device (28); '
            "free some space there"
        )

    @pytest.mark.parametrize("reason", ["No space left on device (28)", ""])
    def test_a_reason_that_rsync_has_lost_is_noticed(self, reason):
        said = f"{reason}\nrsync error: error in file IO (code 11) at receiver.c(381)\n"
        copy = Copy("h1", Tree(Path("/e")), True)
        assert has_lost_reason(copy, ended(11, said)) == (not reason)
        assert not has_lost_reason(copy, ended(12, said))

    def test_files_that_vanish_during_the_copy_are_not_a_failure(self):
        assert copy_fault(Copy("h1", Tree(Path("/e")), True), ended(24), LATE) is None
        assert copy_fault(Copy("h1", Tree(Path("/e")), False), ended(24), LATE) is not None

    def test_copied_files_are_counted(self):
        copy = Copy("h1", Tree(Path("/p"), ("a", "b")), True)
        said = "Number of regular files transferred: 1,234\nTotal transferred file size: 5,678,901 bytes\n"
        assert describe_copy(copy, ended(0, out=said)) == (
            "host h1: copied 1234 files, 5678901 bytes, of /p (a, b) in 1.5 s"
        )
        said = "Number of regular files transferred: 0\nTotal transferred file size: 0 bytes\n"
        assert describe_copy(copy, ended(0, out=said)) == "host h1: nothing has changed in /p (a, b)"


def test_an_unwritable_environment_is_refused():
    with pytest.raises(PopRunError, match=r"/proc cannot be written here \(.*\), so poprun cannot tell which hosts"):
        synchronise(["far"], PythonEnvironment((Tree(Path("/proc")),), ()), os.environ, Log())
