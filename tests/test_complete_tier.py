"""The parts of the complete tier, and the changes that make them due."""

import re
import subprocess
import sys
from pathlib import Path

import complete_tier
import pytest
from complete_tier import PARTS, ROOT, Part, digest, due, note_passed, part_of, parts_named, state


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a small project with one part that has passed."""
    monkeypatch.setattr(complete_tier, "ROOT", tmp_path)
    monkeypatch.setattr(complete_tier, "PASSED", tmp_path / "complete-at")
    monkeypatch.setattr(complete_tier, "PARTS", {"hosts": Part("several hosts", ("code",)), "more": Part("more", ())})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "ssh.py").write_text('"""The connection."""\n\nPORT = 22\n"""Its port."""\n')
    note_passed(["hosts"], state())
    return tmp_path


@pytest.mark.parametrize("part", PARTS)
def test_a_part_names_files_and_folders_that_exist(part):
    assert [path for path in (*PARTS[part].code, *PARTS[part].tests) if not (ROOT / path).exists()] == []


def test_a_test_file_belongs_to_the_part_with_the_longest_matching_path():
    assert part_of(ROOT / "tests" / "jobs" / "test_promises.py") == "jobs"
    assert part_of(ROOT / "tests" / "jobs" / "test_verify.py") == "reports"
    assert part_of(ROOT / "tests" / "test_installed.py") == "packaging"


def test_an_unknown_part_is_refused_with_the_existing_ones():
    with pytest.raises(ValueError, match=r"no part of the complete tier: zebra; there are transports, hosts, "):
        parts_named("hosts,zebra")


def test_a_passed_part_is_not_due(project):
    assert due() == []


def test_changed_docstrings_and_comments_make_no_part_due(project):
    (project / "code" / "ssh.py").write_text('"""Another word."""\n\nPORT = 22  # IANA\n"""The port of ssh."""\n')
    assert due() == []


@pytest.mark.parametrize("name", ["ssh.py", "telnet.py", "kernel.c"])
def test_changed_and_new_code_makes_a_part_due(project, name):
    (project / "code" / name).write_text("PORT = 23\n")
    assert due() == ["hosts"]


def test_code_changed_during_a_run_is_not_noted_as_passed(project):
    begun_with = state()
    (project / "code" / "ssh.py").write_text("PORT = 23\n")
    with pytest.raises(RuntimeError, match="code was changed while the complete tier ran"):
        note_passed(["hosts"], begun_with)
    assert due() == ["hosts"]


def test_a_part_without_code_has_a_digest_that_is_never_due():
    assert digest(PARTS["training"]) == "-"


def test_the_page_on_testing_lists_every_part():
    page = (ROOT / "docs" / "project" / "testing.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) == list(PARTS)


def test_pytest_refuses_an_unknown_part_in_one_line():
    command = (sys.executable, "-m", "pytest", "--quiet", "--parts", "zebra", str(Path(__file__).with_name("pages.py")))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: --parts: no part of the complete tier: zebra; there are transports, hosts,")
