"""Portability, cleanness and error messages of the shell scripts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import fake
from installing import copy_build_files

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "launch_scripts").iterdir() if path.suffix in (".sh", ".sbatch"))
TEST_BED = sorted((ROOT / "tests" / "cluster" / "testbed").glob("*.sh"))
STARTERS = ["demo.sh", "test.sh", "mpirun_digits.sh", "two_terminals.sh"]


def sh(script, *arguments, path, cwd=None, **environ):
    return subprocess.run(
        ["sh", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={"PATH": path, **environ},
        cwd=cwd,
    )


def find_shellcheck():
    return shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(find_shellcheck() is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", [*SCRIPTS, *TEST_BED, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_shellcheck_has_no_complaint(script):
    done = subprocess.run([find_shellcheck(), str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


@pytest.fixture
def project(tmp_path):
    """Copy the scripts and metadata into a folder with a space in its name."""
    copy = tmp_path / "my project"
    shutil.copytree(ROOT / "launch_scripts", copy / "launch_scripts")
    copy_build_files(copy)
    return copy


@pytest.fixture
def tools(tmp_path):
    """Provide a folder for PATH with the programs that scripts need, but without Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "dirname", "cat", "cksum", "id", "nproc", "rm", "sed"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


@pytest.mark.parametrize("script", STARTERS)
def test_a_missing_python_is_reported(script, project, tools):
    done = sh(project / "launch_scripts" / script, path=str(tools))
    assert done.returncode == 1
    assert "error: no Python 3.11 or newer found; install one, or name it: PYTHON=" in done.stderr
    assert not (project / ".venv").exists()


def test_an_active_environment_with_an_old_python_is_reported(project, tools, tmp_path):
    fake(tmp_path / "old" / "bin", "python", "exit 1")
    done = sh(project / "launch_scripts" / "demo.sh", path=str(tools), VIRTUAL_ENV=str(tmp_path / "old"))
    assert done.returncode == 1
    assert "has a Python older than 3.11; deactivate it" in done.stderr


def test_a_failing_installation_is_reported_and_tried_again(project, tools, tmp_path):
    bin_ = tmp_path / "env" / "bin"
    fake(bin_, "python", 'case "$*" in *install*) echo "no network" >&2; exit 1;; esac')
    for _ in range(2):
        done = sh(project / "launch_scripts" / "demo.sh", path=str(tools), VIRTUAL_ENV=str(bin_.parent))
        assert done.returncode == 1
        assert "no network\nerror: pip could not install the project; is the package index" in done.stderr


def test_the_project_is_installed_again_only_after_changes_of_its_metadata(project, tools, tmp_path):
    bin_, calls = tmp_path / "an env" / "bin", tmp_path / "calls"
    fake(bin_, "python", f'case "$*" in *install*) echo "$*" >> "{calls}";; esac')
    fake(bin_, "poprun", 'for word in "$@"; do printf "[%s]" "$word"; done')

    def demo():
        done = sh(
            project / "launch_scripts" / "demo.sh",
            *("--epochs", "3", "--data", "my file"),
            path=str(tools),
            cwd=project,
            VIRTUAL_ENV=str(bin_.parent),
        )
        assert done.returncode == 0, done.stderr
        return done

    first, second = demo(), demo()
    assert len(calls.read_text().splitlines()) == 1
    assert "--editable .[examples]" in calls.read_text()
    (project / "setup.cfg").write_text("[metadata]\nname = other\n")
    demo()
    assert len(calls.read_text().splitlines()) == 2
    root = "[--allow-run-as-root][yes]" if os.geteuid() == 0 else ""
    assert (
        first.stdout
        == second.stdout
        == (
            f"[--num-instances][2][--num-replicas][4]{root}[python][-m][popdist.examples.digits]"
            "[--epochs][3][--data][my file]"
        )
    )
    assert "python -m popdist.examples.digits --epochs 3 --data 'my file'\n" in second.stderr


class TestSlurmJob:
    """Copies of slurm.sbatch, as Slurm runs them elsewhere; tests/cluster submits it to a real Slurm."""

    @pytest.fixture
    def copy(self, project, tmp_path):
        (tmp_path / "spool").mkdir()
        return shutil.copy(project / "launch_scripts" / "slurm.sbatch", tmp_path / "spool" / "slurm_script")

    def test_a_start_outside_of_slurm_is_refused_with_the_right_command(self, copy, project, tools):
        done = sh(copy, path=str(tools), cwd=project)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "error: this is not a Slurm job; submit it: sbatch launch_scripts/slurm.sbatch\n"

    def test_a_submission_from_another_folder_is_refused(self, copy, tools, tmp_path):
        done = sh(copy, path=str(tools), cwd=tmp_path, SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(tmp_path))
        assert done.returncode == 1
        assert f"submitted in {tmp_path}, which is not the project's folder; call sbatch there" in done.stderr

    @pytest.mark.parametrize("size", [{"SLURM_NTASKS": "4"}, {"SLURM_JOB_NUM_NODES": "4"}])
    def test_every_task_becomes_an_instance(self, size, copy, project, tools, tmp_path):
        bin_ = tmp_path / "env" / "bin"
        fake(bin_, "python", "exit 0")
        fake(bin_, "poprun", 'for word in "$@"; do printf "[%s]" "$word"; done')
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[0-1]", "SLURM_SUBMIT_DIR": str(project), **size}
        done = sh(copy, "--epochs", "3", path=str(tools), cwd=tmp_path, VIRTUAL_ENV=str(bin_.parent), **job)
        root = "[--allow-run-as-root][yes]" if os.geteuid() == 0 else ""
        assert done.stdout == (
            f"[--num-instances][4][--num-replicas][4]{root}[python][-m][popdist.examples.digits][--epochs][3]"
        )
        assert "in 4 instances on h[0-1]" in done.stderr


def test_all_tests_in_the_lists_of_versions_sh_exist():
    """versions.sh names the tests that run with other versions."""
    script = (ROOT / "tests" / "versions.sh").read_text()
    modules = re.search(r'^modules="([^"]+)"', script, re.M)[1].split()
    others = re.findall(r"tests/[\w/]+\.py|tests/poprun", script)
    names = [*(f"tests/strategies/test_{name}.py" for name in modules), *others]
    assert len(modules) > 20
    assert len(others) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


class TestTestScript:
    """Calls of test.sh, with programs that only note how they are called."""

    @pytest.fixture
    def run_tests(self, project, tools, tmp_path):
        bin_ = tmp_path / "env" / "bin"
        (project / ".ci").mkdir()

        def run(*words, ruff="exit 0", python=f'printf "%s " "$@" >>"{tmp_path}/calls"; echo >>"{tmp_path}/calls"'):
            for name in ("mypy", "codespell", "shellcheck", "sh"):
                fake(bin_, name, "exit 0")
            fake(bin_, "ruff", ruff)
            fake(bin_, "python", python)
            done = sh(project / "launch_scripts" / "test.sh", *words, path=str(tools), VIRTUAL_ENV=str(bin_.parent))
            commands = [line.removeprefix("+ ") for line in done.stderr.splitlines() if line.startswith("+ ")]
            return done, [command for command in commands if command.startswith(("python ", "sh "))]

        return run

    def test_every_linter_and_the_tests_run_even_when_one_fails(self, run_tests):
        done, commands = run_tests("-k", "ring", ruff="exit 1")
        assert done.returncode == 1
        assert commands == ["python -m pytest -k ring"]
        assert done.stderr.endswith("error: failed: ruff check .; ruff format --check .;\n")

    def test_a_failing_default_tier_is_run_only_once(self, run_tests):
        done, [command] = run_tests(python='case "$*" in *pytest*) exit 1;; esac')
        assert done.returncode == 1
        assert "--numprocesses" in command
        assert "--complete" not in command

    def test_the_complete_tier_is_all_tests_planted_faults_a_soak_and_other_versions(self, run_tests):
        done, commands = run_tests("--complete")
        assert done.returncode == 0, done.stderr
        assert "--numprocesses" in commands[0]
        assert commands[0].endswith(" --parts all")
        assert commands[1:] == [
            f"python tests/mutations --jobs {len(os.sched_getaffinity(0))}",
            "python benchmarks/soak.py --seed 9 --count 8",
            "sh tests/versions.sh",
        ]

    def test_parts_of_the_complete_tier_run_with_all_tests_of_the_default_tier(self, run_tests):
        done, commands = run_tests("--parts", "hosts,soak")
        assert done.returncode == 0, done.stderr
        assert commands[0].endswith(" --parts hosts,soak")
        assert commands[1:] == [
            "python benchmarks/soak.py --seed 9 --count 8",
        ]

    def test_chosen_tests_may_belong_to_the_complete_tier(self, run_tests):
        _, commands = run_tests("--complete", "tests/cluster")
        assert commands == ["python -m pytest --parts all tests/cluster"]

    @pytest.mark.parametrize("words", [["--parts"], ["--parts", ""]])
    def test_a_missing_list_of_parts_is_refused_before_anything_runs(self, run_tests, words):
        done, commands = run_tests(*words)
        assert done.returncode == 1
        assert commands == []
        assert done.stderr == "error: --parts needs a list, such as hosts,jobs; docs/project/testing.md has the names\n"
