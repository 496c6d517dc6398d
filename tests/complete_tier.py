"""The parts of the complete tier: their tests, their code, and its changes since they passed.

    python tests/complete_tier.py due                      the parts that are due, separated by commas
    python tests/complete_tier.py state                    a line for each part: its name and the digest of its code
    python tests/complete_tier.py passed PARTS STATE       notes in .ci/complete-at that parts, or all, passed

A part is due if its code has changed since it passed. Docstrings and comments do not
count. The digest depends on the version of Python, as its syntax trees do; CI uses one version.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
PASSED = ROOT / ".ci" / "complete-at"


@dataclass(frozen=True)
class Part:
    """A part of the complete tier.

    Attributes:
        purpose: What the part shows that the default tier does not.
        code: Files and folders. A change of their code makes the part due.
        tests: Files and folders of tests; the longest path that fits a test decides. Empty for other programs.
    """

    purpose: str
    code: tuple[str, ...]
    tests: tuple[str, ...] = ()


PARTS = {
    "transports": Part(
        "every dtype, refusal and size over each real transport, without the kernel, and the kernel under sanitizers",
        ("collectives/backends", "collectives/kernel.py", "collectives/native", "collectives/shared_memory"),
        ("tests/collectives",),
    ),
    "hosts": Part(
        "several hosts, Slurm, ssh and users without root, in network namespaces",
        (
            *(
                "poprun/agent",
                "poprun/hosts",
                "poprun/ipc",
                "poprun/launch",
                "poprun/supervisor",
                "popdist/environments",
            ),
            *(f"launch_scripts/kubernetes/{name}" for name in ("mpijob.yaml", "runtime.yaml", "ssh_config")),
            *(f"launch_scripts/kubernetes/{name}" for name in ("sshd_config", "trainjob.yaml")),
        ),
        ("tests/cluster",),
    ),
    "jobs": Part(
        "each kind of loss, signal and restart in each phase of a real job",
        (
            *(
                "collectives/backends",
                "popdist/launched.py",
                "popdist/launcher.py",
                "popdist/launching",
                "popdist/membership",
                "poprun/__main__.py",
                "poprun/agent",
                "poprun/cli",
                "poprun/command.py",
                "poprun/ipc",
                "poprun/launch",
            ),
            *("poprun/output", "poprun/supervisor"),
        ),
        ("tests/jobs", "tests/poprun", "tests/popdist", "tests/launch_scripts"),
    ),
    "reports": Part(
        "timelines, summaries and verification of real jobs, and damaged recordings",
        ("poprun/monitor", "poprun/trace", "poprun/verify"),
        (
            *("tests/jobs/test_profile_jobs.py", "tests/jobs/test_timeline_jobs.py", "tests/jobs/test_verify.py"),
            *("tests/jobs/test_watched_jobs.py", "tests/poprun/test_timeline_damage.py"),
            "tests/poprun/test_timeline_in_a_browser.py",
        ),
    ),
    "lightning": Part(
        "jobs of Lightning's Trainer, where PyTorch Lightning is installed",
        ("strategies/torch/lightning",),
        ("tests/jobs/test_lightning_jobs.py", "tests/strategies/on_torch/test_lightning.py"),
    ),
    "training": Part(
        "wider matrices of models, strategies and spreads; before a release",
        (),
        ("tests/strategies", "tests/benchmarks", "tests/mutations"),
    ),
    "packaging": Part(
        "wheel, source distribution, types and constraints in empty environments; before a release",
        (),
        ("tests",),
    ),
    "faults": Part(
        "planted faults: whether tests of the default tier notice each of them",
        ("collectives/backends", "poprun/launch", "poprun/supervisor", "tests/mutations"),
    ),
    "soak": Part(
        "jobs that lose instances at random moments",
        ("collectives/backends", "poprun/agent", "poprun/ipc", "poprun/supervisor"),
    ),
    "versions": Part("other versions of Python and JAX", ("setup.cfg", "tests/versions.sh", "collectives/backends")),
}


def part_of(test: Path) -> str:
    """Return the part that runs a file of tests."""
    name = test.relative_to(ROOT).as_posix()
    fits = [(len(path), part) for part, each in PARTS.items() for path in each.tests if _is_below(name, path)]
    return max(fits)[1]


def parts_named(names: str) -> list[str]:
    """Return the parts that a list such as "hosts,jobs" names; "all" names each.

    Raises:
        ValueError: If a name is unknown.
    """
    parts = list(PARTS) if names == "all" else names.split(",") if names else []
    if unknown := set(parts) - PARTS.keys():
        raise ValueError(f"no part of the complete tier: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return parts


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def is_complete(config: pytest.Config, test: Path) -> bool:
    """Return whether a run of pytest takes the tests of the complete tier from a file."""
    return part_of(test) in parts_named(config.getoption("--parts"))


def digest(part: Part) -> str:
    """Return the digest of the code that a part is for, in hexadecimal digits; "-" if no code makes it due."""
    if not part.code:
        return "-"
    found = hashlib.sha256()
    for path in files_of(part):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + _code_of(path) + b"\0")
    return found.hexdigest()[:16]


def files_of(part: Part) -> Iterator[Path]:
    """Yield the files that a part is for, in the order of their names."""
    for name in part.code:
        path = ROOT / name
        if path.is_file():
            yield path
        else:
            yield from sorted(each for each in path.rglob("*") if each.suffix in (".c", ".py"))


def _code_of(path: Path) -> bytes:
    """Return the syntax tree of Python without docstrings; the bytes of other files."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return ast.dump(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def state() -> dict[str, str]:
    """Return the digest of each part's code."""
    return {name: digest(part) for name, part in PARTS.items()}


def passed() -> dict[str, str]:
    """Return the digests of parts when they passed."""
    if not PASSED.exists():
        return {}
    return dict(line.split() for line in PASSED.read_text(encoding="utf-8").splitlines())


def due() -> list[str]:
    """Return the parts whose code has changed since they passed."""
    before = passed()
    return [name for name, now in state().items() if now not in ("-", before.get(name))]


def note_passed(parts: list[str], begun_with: dict[str, str]) -> None:
    """Write the digests of parts that passed; RuntimeError if code was changed while they ran."""
    if state() != begun_with:
        raise RuntimeError("code was changed while the complete tier ran; run it again, then commit .ci/complete-at")
    digests = {**passed(), **{name: begun_with[name] for name in parts}}
    PASSED.write_text("".join(f"{name} {digests[name]}\n" for name in PARTS if name in digests), encoding="utf-8")


def main(words: list[str]) -> None:
    """Run one of the commands in the module's docstring."""
    match words:
        case ["due"]:
            print(",".join(due()))
        case ["state"]:
            print("\n".join(f"{name} {now}" for name, now in state().items()))
        case ["passed", parts, begun_with]:
            note_passed(parts_named(parts), dict(line.split() for line in begun_with.splitlines()))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
