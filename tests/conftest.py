"""Options, hooks and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from complete_tier import is_complete, parts_named
from kept_programs import kept_programs, remove_unused
from leftovers import Lookout
from sharing_cores import SERVER_VARIABLE, TokenServer, cores_of

import collectives.network  # noqa: F401  # sets what gRPC reads when it is loaded, which tests may do first
from popdist.membership.process import process

if TYPE_CHECKING:
    from handing_out import FilesOfTheDead
    from xdist.remote import Producer

SEED = 13
JAX_KEEPS = "JAX_COMPILATION_CACHE_DIR"
"""The variable that tells JAX where compiled programs lie."""
LOOKOUT = pytest.StashKey[Lookout]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options of the tests."""
    parser.addoption(
        "--parts", default="", help="run the tests marked `complete` of these parts too, as hosts,jobs; or all"
    )
    parser.addoption("--complete", dest="parts", action="store_const", const="all", help="the same as --parts all")
    parser.addoption("--seed", type=int, default=SEED, help=f"what random tests draw from (default: {SEED})")


def pytest_report_header(config: pytest.Config) -> str:
    """Return the header with the seed, which allows to repeat a run."""
    return f"seed of random tests: {config.getoption('--seed')} (--seed N)"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that only the complete tier runs, unless a test is named on the command line."""
    try:
        parts_named(config.getoption("--parts"))
    except ValueError as error:
        raise pytest.UsageError(f"--parts: {error}") from None
    if not any("::" in argument for argument in config.args):
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            is_run = not item.get_closest_marker("complete") or is_complete(config, item.path)
            (kept if is_run else left_out).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = kept
    if hasattr(config, "workerinput"):  # pytest-xdist hands files out in this order
        items[:] = mixed(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn Python's garbage collector off while tests are found: a third of that time would be its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze JAX and all tests for Python's garbage collector, because they live until the end.

    Raise its thresholds, too: tracing makes many small objects, and few cycles of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesOfTheDead | None:
    """Let a run continue to its end after a worker is killed."""
    if config.getvalue("dist") != "loadfile":
        return None
    from handing_out import FilesOfTheDead
    from xdist.scheduler import LoadFileScheduling

    return FilesOfTheDead(LoadFileScheduling(config, log))


def mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return items with files that keep several cores busy spread evenly among the others, each file in one piece.

    Long files come first, so that at the end no worker still has a long file while the others have nothing.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: tuple[list[list[pytest.Item]], ...] = ([], [])
    for of_file in sorted(files.values(), key=lambda items: not items[0].get_closest_marker("long")):
        kinds[any(item.get_closest_marker("cores") for item in of_file)].append(of_file)
    placed = [((number + 0.5) / len(kind), of_file) for kind in kinds for number, of_file in enumerate(kind)]
    return [item for _, of_file in sorted(placed, key=lambda place: place[0]) for item in of_file]


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of random tests; pytest's header shows it, `--seed` changes it."""
    number: int = pytestconfig.getoption("--seed")
    return number


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test once its cores are free; its own time limit excludes the wait."""
    mark = item.get_closest_marker("cores")
    with cores_of(os.environ[SERVER_VARIABLE], mark.args[0] if mark else 1):
        return (yield)


@pytest.fixture(autouse=True)
def nothing_is_left(pytestconfig: pytest.Config) -> Iterator[None]:
    """Check that no process, shared memory or temporary file outlives its test."""
    lookout = pytestconfig.stash[LOOKOUT]
    before = lookout.present()
    yield
    left = lookout.left_since(before)
    assert not left, "the test has left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def joins_no_job() -> Iterator[None]:
    """Check that no test joins a job in this process, which would stay an instance in the tests of other files."""
    before = process.instance, process.cluster, process.num_replicas
    yield
    after = process.instance, process.cluster, process.num_replicas
    assert after == before, "the test has called popdist.init, for all tests after it; let it start a process"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary folder of this process."""
    if (lookout := config.stash.get(LOOKOUT, None)) is not None:
        lookout.close()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the resources that the tests of this process and its workers share."""
    if SERVER_VARIABLE not in os.environ:  # a worker of pytest-xdist inherits the variable
        os.environ[SERVER_VARIABLE] = TokenServer(3 * len(os.sched_getaffinity(0))).address  # jobs mostly wait
    take_signals_as_in_a_terminal()
    os.environ.setdefault("KERAS_BACKEND", "jax")  # for the first test that loads Keras
    os.environ.pop("COLUMNS", None)  # pytest-xdist tells its workers how wide its own page is
    config.stash[LOOKOUT] = Lookout()
    share_compiled_programs(config)


def take_signals_as_in_a_terminal() -> None:
    """Restore signals ignored by nohup or a background shell, so that they end programs started by tests."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def share_compiled_programs(config: pytest.Config) -> None:
    """Let the hundreds of JAX processes that tests start share compiled programs.

    All workers of pytest-xdist and later runs share the folder. JAX writes its files in place; a process that finds a
    half-written file compiles the program itself, silently, because its output is often part of a test.
    """
    if (cache := getattr(config, "cache", None)) is not None and JAX_KEEPS not in os.environ:  # -p no:cacheprovider
        try:
            os.environ[JAX_KEEPS] = str(kept_programs(os.environ))
            remove_unused(os.environ)
        except OSError:  # a read-only home
            os.environ[JAX_KEEPS] = str(cache.mkdir("jax"))
    half_written = [f"ignore:Error {verb} persistent compilation cache:UserWarning" for verb in ("reading", "writing")]
    os.environ.setdefault("PYTHONWARNINGS", ",".join(half_written))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if "jax" in sys.modules:  # by the conftest of a folder that was named on the command line
        options = sys.modules["jax"].config
        options.update("jax_compilation_cache_dir", os.environ.get(JAX_KEEPS))
        options.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        options.update("jax_persistent_cache_min_entry_size_bytes", -1)
