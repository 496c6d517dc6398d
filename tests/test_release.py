"""Files of a release, compared with each other and with the tools that they describe."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from popdist.version import __version__

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_changelog_and_the_citation_name_the_version():
    assert re.findall(r"^## (\d\S+) - \d{4}-\d\d-\d\d$", text_of("CHANGELOG.md"), flags=re.MULTILINE)[0] == __version__
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == __version__


def test_the_release_in_the_changelog_is_at_most_60_lines():
    newest = text_of("CHANGELOG.md").split("<!-- releases -->")[1].split("\n## ")[1]
    assert len(newest.splitlines()) <= 60


def test_towncrier_builds_the_next_release_from_all_changes():
    pytest.importorskip("towncrier", reason="towncrier is not installed")
    command = (sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    entries = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert done.stdout.count("\n- ") == len(entries), (
        "a file in changes/ has a name that changes/README.md does not allow"
    )


def test_pre_commit_hooks_are_the_linters_of_the_tests():
    [local] = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    linters = re.findall(
        r"^check (ruff.*|codespell|shellcheck|mypy)\b", text_of("launch_scripts/test.sh"), re.MULTILINE
    )
    assert {hook["entry"].removesuffix(" .") for hook in local["hooks"]} == {
        each.removesuffix(" .") for each in linters
    }


@pytest.mark.parametrize(("workflow", "command"), [("ci", ".ci/run"), ("nightly", ".ci/run --complete")])
def test_a_workflow_runs_what_ci_runs(workflow, command):
    steps = yaml.safe_load(text_of(f".github/workflows/{workflow}.yml"))["jobs"]["run"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [command]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_forms_and_workflows_are_yaml(path):
    assert "name" in yaml.safe_load(path.read_text(encoding="utf-8"))
