"""The parts of the complete tier, and their tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """A part of the complete tier.

    Attributes:
        purpose: What the part shows that the default tier does not.
        tests: Files and folders of tests; the longest path that fits a test decides. Empty for other programs.
    """

    purpose: str
    tests: tuple[str, ...] = ()


PARTS = {
    "transports": Part(
        "every dtype, refusal and size over each real transport, without the kernel, and the kernel under sanitizers",
        ("tests/collectives",),
    ),
    "hosts": Part("several hosts, Slurm, ssh and users without root, in network namespaces", ("tests/cluster",)),
    "jobs": Part(
        "each kind of loss, signal and restart in each phase of a real job",
        ("tests/jobs", "tests/poprun", "tests/popdist", "tests/launch_scripts"),
    ),
    "reports": Part(
        "timelines, summaries and verification of real jobs, and damaged recordings",
        (
            *("tests/jobs/test_profile_jobs.py", "tests/jobs/test_timeline_jobs.py", "tests/jobs/test_verify.py"),
            *("tests/jobs/test_watched_jobs.py", "tests/poprun/test_timeline_damage.py"),
            "tests/poprun/test_timeline_in_a_browser.py",
        ),
    ),
    "lightning": Part(
        "jobs of Lightning's Trainer, where PyTorch Lightning is installed",
        ("tests/jobs/test_lightning_jobs.py", "tests/strategies/on_torch/test_lightning.py"),
    ),
    "training": Part(
        "wider matrices of models, strategies and spreads",
        ("tests/strategies", "tests/benchmarks", "tests/mutations"),
    ),
    "packaging": Part("wheel, source distribution, types and constraints in empty environments", ("tests",)),
    "faults": Part("planted faults: whether tests of the default tier notice each of them"),
    "soak": Part("jobs that lose instances at random moments"),
    "versions": Part("other versions of Python and JAX"),
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
