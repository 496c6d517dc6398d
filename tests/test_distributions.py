"""Programs of README.md with a wheel and a source distribution, each in an empty environment."""

import os
import re
import subprocess
import sys
import venv

import pytest
from pages import ROOT, page_programs

from popdist.version import __version__

LIMIT_S = 600.0
CONSTRAINTS = ROOT / "launch_scripts" / "constraints.txt"
pytestmark = [pytest.mark.complete, pytest.mark.job, pytest.mark.long, pytest.mark.timeout(3 * LIMIT_S)]


def run(*command, cwd, **environ):
    """Run a command that finds the project only if it is installed; return its standard output."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    clean = {name: value for name, value in os.environ.items() if name not in hidden} | environ
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=LIMIT_S, env=clean, cwd=cwd, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Return the source distribution and the wheel built from it, by their endings."""
    folder = tmp_path_factory.mktemp("dist")
    checkout = folder / "checkout"
    run("git", "clone", "--quiet", ROOT, checkout, cwd=folder)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", checkout, cwd=folder)
    return {path.suffix: path for path in (folder / "dist").iterdir()}


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory):
    """Return the programs' folder of a new environment, which contains only pip."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder / "bin"


@pytest.fixture(scope="module", params=[".whl", ".gz"], ids=["wheel", "sdist"])
def environment(request, distributions, empty_environment):
    """Return the environment with a distribution of the project; the second replaces the first."""
    script = (ROOT / "launch_scripts" / "install_horovod.sh").read_text(encoding="utf-8")
    torch_without_cuda = re.search(r"^torch_without_cuda=(\S+)", script, re.MULTILINE)[1]
    if request.param == ".whl":
        words = ("--constraint", CONSTRAINTS, "--extra-index-url", torch_without_cuda)
    else:
        words = ("--force-reinstall", "--no-deps")
    project = f"popdist-everywhere[examples,torch] @ {distributions[request.param].as_uri()}"
    run(empty_environment / "python", "-m", "pip", "install", "--quiet", *words, project, cwd=empty_environment)
    return empty_environment


def start(environment, *words, cwd):
    """Run a command with the programs of the environment first in PATH."""
    return run(environment / words[0], *words[1:], cwd=cwd, PATH=f"{environment}:{os.environ['PATH']}")


def poprun(environment, instances, *words, cwd):
    """Return what instance 0 prints under poprun with four replicas."""
    root = ("--allow-run-as-root", "yes") if os.geteuid() == 0 else ()
    return start(environment, "poprun", f"--num-instances={instances}", "--num-replicas=4", *root, *words, cwd=cwd)


def test_programs_of_the_readme_have_the_same_bits_on_one_and_two_instances(environment, tmp_path):
    programs = page_programs("README.md")
    assert len(programs) == 2
    for number, program in enumerate(programs):
        path = tmp_path / f"program_{number}.py"
        path.write_text(program, encoding="utf-8")
        printed = [poprun(environment, n, "python", path, cwd=tmp_path) for n in (1, 2)]
        [one], [two] = (re.findall(r"loss \d\.\d{3}, [0-9a-f]{64}\n", each) for each in printed)
        assert one == two


def test_the_example_runs(environment, tmp_path):
    printed = poprun(environment, 2, "python", "-m", "popdist.examples.digits", "--max-steps", "3", cwd=tmp_path)
    assert re.search(r"variables [0-9a-f]{64}", printed)


def test_the_launcher_prints_its_version(environment, tmp_path):
    assert start(environment, "poprun", "--version", cwd=tmp_path) == f"poprun {__version__}\n"
