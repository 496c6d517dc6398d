"""Measure which statements and branches of the packages the tests reach, even in processes that they start.

python tests/what_is_covered.py [--tree FOLDER] [--missing PACKAGE ...] [arguments of pytest]

Runs pytest with the given arguments (none: the default tier), with one worker more than there are cores unless a number
is given; pyproject.toml says what is measured. Prints a row for each package, and with `--missing` the unreached lines.
The figures are lower bounds: processes that are killed (SIGKILL) or run without installed packages (the agents of
poprun), and threads that are not Python's (calls back from compiled programs), are not measured. Everything is slower
when measured, so time limits are longer.

With `--tree` the tests of another checkout are run and measured, such as those of an earlier commit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("collectives", "popdist", "poprun", "strategies")
LIMIT_S = 600
COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def main() -> int:
    """Measure the tests, print the tables, and return the exit status of pytest."""
    options, of_pytest = _options()
    with tempfile.TemporaryDirectory(prefix="covered-") as folder:
        status = _measure(options.tree, Path(folder), of_pytest)
        report = _report(options.tree, Path(folder))
        print(table(report["files"]))
        for package in options.missing:
            print("\n".join(missing(report["files"], package)))
    return status


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--tree", type=Path, default=PROJECT, metavar="FOLDER", help="the checkout to measure")
    parser.add_argument("--missing", nargs="+", default=[], choices=PACKAGES, help="say what is not reached in these")
    return parser.parse_known_args()


def _measure(tree: Path, folder: Path, of_pytest: Sequence[str]) -> int:
    if not any(word.startswith(("-n", "--numprocesses")) for word in of_pytest):
        of_pytest = [f"--numprocesses={len(os.sched_getaffinity(0)) + 1}", "--dist=loadfile", *of_pytest]
    limit = f"--override-ini=timeout={LIMIT_S}"
    return _coverage(tree, folder, "run", "-m", "pytest", "-q", limit, *of_pytest)


def _report(tree: Path, folder: Path) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    if _coverage(tree, folder, "combine", "--quiet"):
        raise SystemExit("nothing was measured: is the package coverage of the extra `dev` there?")
    _coverage(tree, folder, "json", "--quiet", "-o", str(folder / "report.json"))
    report: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads((folder / "report.json").read_text())
    return report


def _coverage(tree: Path, folder: Path, action: str, *words: str) -> int:
    options = ("--rcfile", str(PROJECT / "pyproject.toml"), "--data-file", str(folder / "data"))
    environ = {**os.environ, "PYTHONPATH": str(tree)}  # its packages, wherever the environment has others
    command = (sys.executable, "-m", "coverage", action, *options, *words)
    return subprocess.run(command, cwd=tree, env=environ, check=False).returncode


def table(files: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Return a Markdown table with a row for each package, and one for all.

    Args:
        files: The report of coverage for each file, by its path from the root of the project.
    """
    rows = [(package, _sum(files, package)) for package in PACKAGES]
    rows.append(("all", sum((counts for _, counts in rows), Counter())))
    head = ["| package | statements | reached | branches | reached |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_row(name, counts) for name, counts in rows)])


def _sum(files: Mapping[str, Mapping[str, Mapping[str, int]]], package: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path, found in files.items():
        if Path(path).parts[0] == package:
            counts.update({name: found["summary"][name] for name in COUNTS})
    return counts


def _row(name: str, counts: Mapping[str, int]) -> str:
    lines, statements, taken, branches = (counts.get(each, 0) for each in COUNTS)
    return f"| {name} | {statements} | {_share(lines, statements)} | {branches} | {_share(taken, branches)} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def missing(files: Mapping[str, Mapping[str, Iterable[int]]], package: str) -> list[str]:
    """Return for each file of a package the lines that were not reached."""
    return [
        f"{path}: {ranges(found['missing_lines'])}"
        for path, found in sorted(files.items())
        if Path(path).parts[0] == package and found["missing_lines"]
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in order as `1, 3-5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)


if __name__ == "__main__":
    sys.exit(main())
