"""Plant faults in a copy of the project, one at a time, and show that tests of the default tier catch each.

python tests/mutations [--only NAME ...] [--jobs N]
python tests/mutations --list
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from fault import Fault, OutOfDateError, check, chosen
from faults import FAULTS
from trial import LIMIT_S, Run, Trial, check_without_fault

PROJECT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Try the faults, and return exit status 0 only if every one is caught."""
    options = _options()
    try:
        faults = chosen(FAULTS, options.only)
        check(faults, PROJECT)
        if options.list:
            print(*(fault.name for fault in faults), sep="\n")
            return 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
            return _try_all(faults, Path(folder), options.jobs)
    except OutOfDateError as error:
        print(f"the list of faults is out of date: {error}", file=sys.stderr)
        return 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="the faults with this in their name")
    parser.add_argument("--list", action="store_true", help="print their names, and try none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many to try at once (default: 1)")
    return parser.parse_args()


def _try_all(faults: Sequence[Fault], folder: Path, jobs: int) -> int:
    trials = [_trial(folder / str(number)) for number in range(max(1, min(jobs, len(faults))))]
    idle: SimpleQueue[Trial] = SimpleQueue()
    for trial in trials:
        idle.put(trial)

    def attempt(fault: Fault) -> bool:
        trial = idle.get()
        try:
            run = trial.with_fault(fault)
        finally:
            idle.put(trial)
        print(_line(fault, run), flush=True)
        return run.has_caught

    with ThreadPoolExecutor(len(trials)) as pool:
        try:
            right = list(pool.map(check_without_fault, trials, _shares(faults, len(trials))))
            passed, wall_s = sum(len(run.passed) for run in right), max(run.wall_s for run in right)
            print(f"without a fault {passed} tests pass in {wall_s:.1f} s", flush=True)
            caught = sum(pool.map(attempt, faults))
        except BaseException:  # a signal
            pool.shutdown(wait=False, cancel_futures=True)
            for trial in trials:
                trial.end()
            raise
    print(f"{caught} of {len(faults)} faults caught")
    return 0 if caught == len(faults) else 1


def _trial(folder: Path) -> Trial:
    folder.mkdir()
    return Trial(PROJECT, folder)


def _shares(faults: Sequence[Fault], count: int) -> list[list[str]]:
    """Divide the catching tests among this many trials, keeping the tests of a file together."""
    files: dict[str, dict[str, None]] = {}
    for test in (fault.caught_by for fault in faults):
        files.setdefault(test.partition("::")[0], {})[test] = None
    shares = [[test for of_file in list(files.values())[first::count] for test in of_file] for first in range(count)]
    return [share for share in shares if share]


def _line(fault: Fault, run: Run) -> str:
    if run.has_caught:
        by = f"{', '.join(run.failed)}{' (by its limit of time)' if run.hung else ''}"
        return f"caught  {run.wall_s:5.1f} s  {fault.name}: {by}"
    why = f"not ended after {LIMIT_S:g} s" if run.status is None else f"pytest ended with {run.status}"
    return f"MISSED  {run.wall_s:5.1f} s  {fault.name}: {why}\n{run.text}"


if __name__ == "__main__":
    sys.exit(main())
