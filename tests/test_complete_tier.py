"""The parts of the complete tier."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from complete_tier import PARTS, ROOT, part_of, parts_named


@pytest.mark.parametrize("part", PARTS)
def test_a_part_names_files_and_folders_that_exist(part):
    assert [path for path in PARTS[part].tests if not (ROOT / path).exists()] == []


def test_a_test_file_belongs_to_the_part_with_the_longest_matching_path():
    assert part_of(ROOT / "tests" / "jobs" / "test_promises.py") == "jobs"
    assert part_of(ROOT / "tests" / "jobs" / "test_verify.py") == "reports"
    assert part_of(ROOT / "tests" / "test_installed.py") == "packaging"


def test_an_unknown_part_is_refused_with_the_existing_ones():
    with pytest.raises(ValueError, match=r"no part of the complete tier: zebra; there are transports, hosts, "):
        parts_named("hosts,zebra")


def test_the_page_on_testing_lists_every_part():
    page = (ROOT / "docs" / "project" / "testing.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) == list(PARTS)


def test_pytest_refuses_an_unknown_part_in_one_line():
    command = (sys.executable, "-m", "pytest", "--quiet", "--parts", "zebra", str(Path(__file__).with_name("pages.py")))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: --parts: no part of the complete tier: zebra; there are transports, hosts,")
