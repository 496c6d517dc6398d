"""Tests on a copy of the project that can contain a planted fault."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from xml.etree import ElementTree

from fault import Fault, OutOfDateError

LIMIT_S = 300.0  # for the tests of one fault; a test that hangs is ended by its own limit long before
_MARK = "POPDIST_MUTATION_TRIAL"  # marks the processes of one trial
_SOME_FAILED = 1  # the exit status of pytest


@dataclass(frozen=True)
class Run:
    """The result of a run of pytest.

    Attributes:
        status: The exit status; None if pytest was ended at the limit.
        passed: The node ids of passed tests, without their parameters.
        failed: The node ids of failed tests.
        hung: Whether a test failed by its time limit.
        text: The output of pytest.
        wall_s: The duration in seconds.
    """

    status: int | None
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    hung: bool
    text: str
    wall_s: float

    @property
    def has_caught(self) -> bool:
        """Return whether a test noticed the fault; an error before the tests does not count."""
        return self.status == _SOME_FAILED and bool(self.failed)


class Trial:
    """A copy of the project, and the runs of pytest in it.

    Args:
        project: The root of the working tree; its files tracked by git, and its kernel, are copied.
        folder: An empty folder, which the caller removes.
    """

    def __init__(self, project: Path, folder: Path) -> None:
        self.root = folder / "project"
        self._folder = folder
        self._runs = 0
        for name in (*_tracked(project), *_built(project)):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project / name, target, follow_symlinks=False)

    @property
    def _place(self) -> Path:
        """Return the folder for files of the present run."""
        return self._folder / str(self._runs)

    def with_fault(self, fault: Fault) -> Run:
        """Run the test that catches a fault while the fault is planted."""
        path = self.root / fault.path
        right = path.read_text()
        try:
            _write(path, fault.planted_in(right))
            return self.run([fault.caught_by], "-x", kernel=fault.needs_kernel)
        finally:
            _write(path, right)

    def run(self, tests: Sequence[str], *options: str, kernel: bool = False) -> Run:
        """Run some tests of the default tier, with or without the native kernel."""
        self._runs += 1
        place = self._place
        place.mkdir()
        report, printed = place / "report.xml", place / "printed.txt"
        command = [sys.executable, "-m", "pytest", *tests, *options, "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not complete"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", f"--basetemp={place / 't'}"]
        started = time.monotonic()
        status: int | None = None
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**self._environ(), "POPDIST_NATIVE": str(int(kernel))},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(LIMIT_S)
            finally:
                self.end()
                process.wait()
        passed, failed = _results(report) if status is not None else ([], [])
        text = printed.read_text(errors="replace")
        return Run(status, tuple(passed), tuple(failed), "Failed: Timeout" in text, text, time.monotonic() - started)

    def end(self) -> None:
        """End remaining processes of the run."""
        _end_all(f"{_MARK}={self._place}".encode())

    def _environ(self) -> dict[str, str]:
        """Return variables that let all processes import the copy's packages and share compiled programs.

        Without the name that CI systems set, because pytest shows whole differences there, which can take minutes.
        """
        cache = str(self._folder / "jax")
        own = {"PYTHONPATH": str(self.root), "JAX_COMPILATION_CACHE_DIR": cache, _MARK: str(self._place)}
        return {name: one for name, one in os.environ.items() if name not in ("CI", "BUILD_NUMBER")} | own


def check_without_fault(trial: Trial, tests: Sequence[str]) -> Run:
    """Run all tests on the unchanged code.

    Raises:
        OutOfDateError: A test fails, does not exist, or does not belong to the default tier.
    """
    run = trial.run(tests)
    absent = [test for test in tests if test not in run.passed and test.partition("[")[0] not in run.passed]
    if run.status != 0 or absent:
        missing = f"; without a test of the default tier that passes: {', '.join(absent)}" if absent else ""
        raise OutOfDateError(f"without any fault pytest ends with {run.status}{missing}\n{run.text}")
    return run


def _tracked(project: Path) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=project, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (project / name).is_file()]


def _built(project: Path) -> list[str]:
    """Return the native kernel, which is built from tracked files, if there is one."""
    return [str(path.relative_to(project)) for path in (project / "collectives" / "native").glob("*.so")]


def _write(path: Path, text: str) -> None:
    """Change a source; two versions with equal time and size would share Python's bytecode."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _results(report: Path) -> tuple[list[str], list[str]]:
    """Return the node ids of passed tests without parameters, and those of failed tests."""
    if not report.is_file():
        return [], []
    passed, failed = [], []
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        name = _node_id(case.get("file", ""), case.get("classname", ""), case.get("name", ""))
        error = case.find("error")
        if case.find("failure") is not None or (error is not None and _is_of_end(error.get("message", ""))):
            failed.append(name)
        elif error is None and case.find("skipped") is None:
            passed.append(name.partition("[")[0])
    return passed, failed


def _is_of_end(message: str) -> bool:
    """Return whether a fixture reports the error after a test, such as remaining processes."""
    return message.startswith("failed on teardown")


def _node_id(file: str, of_class: str, name: str) -> str:
    """Return pytest's name of a test; its report puts the path of the file, with dots, before the class."""
    classes = of_class.removeprefix(file.removesuffix(".py").replace("/", ".")).replace(".", "::")
    return f"{file}{classes}::{name}"


def _end_all(mark: bytes) -> None:
    """End the remaining processes that have inherited the mark."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
