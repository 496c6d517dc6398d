"""Distribution of test files to the workers of pytest-xdist, even after one of them is killed.

When a worker dies, xdist 3.8 may hang: it puts the worker's completed files back at the head of the queue. The new
worker may be given one of them, and gets the next file only after it has completed a test, which never happens. A
worker also begins a test only when it has been given the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROUNDS = 3
"""Each round gives a file to a worker with less than three tests, which then has two or more, or the queue is empty."""


@final
class FilesOfTheDead:
    """A scheduler like `--dist loadfile`; other workers run a dead worker's remaining tests, but not the one it died
    of.

    Args:
        by_file: The scheduler that hands out the files.
    """

    def __init__(self, by_file: LoadFileScheduling) -> None:
        self._by_file = by_file

    def remove_node(self, node: WorkerController) -> str | None:
        """Put a worker's remaining files back; return the test that it died of, or None if it had nothing left to
        do.
        """
        work = self._by_file.assigned_work[node]
        died_of = next((test for tests in work.values() for test, is_done in tests.items() if not is_done), None)
        self._by_file.assigned_work[node] = _left(work, died_of)
        self._by_file.remove_node(node)
        return died_of

    def schedule(self) -> None:
        """Give more files to all workers with few tests."""
        for _ in range(ROUNDS):
            self._by_file.schedule()

    # ---- members that xdist itself implements well

    @property
    def nodes(self) -> list[WorkerController]:
        return self._by_file.nodes

    @property
    def collection_is_completed(self) -> bool:
        return self._by_file.collection_is_completed

    @property
    def tests_finished(self) -> bool:
        return self._by_file.tests_finished

    @property
    def has_pending(self) -> bool:
        return self._by_file.has_pending

    def add_node(self, node: WorkerController) -> None:
        self._by_file.add_node(node)

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        self._by_file.add_node_collection(node, collection)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        self._by_file.mark_test_complete(node, item_index, duration)

    def mark_test_pending(self, item: str) -> None:
        self._by_file.mark_test_pending(item)

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        self._by_file.remove_pending_tests_from_node(node, indices)


def _left(work: dict[str, dict[str, bool]], died_of: str | None) -> dict[str, dict[str, bool]]:
    """Return the files with tests still to be run, and these tests."""
    left = {
        file: {test: False for test, is_done in tests.items() if not is_done and test != died_of}
        for file, tests in work.items()
    }
    return {file: tests for file, tests in left.items() if tests}
