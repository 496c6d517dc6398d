"""Which files the workers of pytest-xdist run, also when one of them is killed.

What xdist 3.8 does by itself when a worker dies can hang: the files that the worker had done go back into the queue, in
front of those that it had not; the new worker is given one file, one of these perhaps, and is given the next when it
has completed a test, which it never does. A worker also begins a test only when it has been given the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROUNDS = 3
"""Each gives a worker a file if it has less than three tests: so it has two, or the queue is empty, after as many."""


@final
class FilesOfTheDead:
    """Hands out files as `--dist loadfile` does; others do what a dead worker had not done, but the test it died of.

    Args:
        by_file: hands out the files.
    """

    def __init__(self, by_file: LoadFileScheduling) -> None:
        self._by_file = by_file

    def remove_node(self, node: WorkerController) -> str | None:
        """Put back what a worker has left; the test that it died of, None where it had nothing to do any more."""
        work = self._by_file.assigned_work[node]
        died_of = next((test for tests in work.values() for test, is_done in tests.items() if not is_done), None)
        self._by_file.assigned_work[node] = _left(work, died_of)
        self._by_file.remove_node(node)
        return died_of

    def schedule(self) -> None:
        """Give all who have little to do more."""
        for _ in range(ROUNDS):
            self._by_file.schedule()

    # ---- what xdist does well by itself

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
    """The files of which something is to be done, and that."""
    left = {
        file: {test: False for test, is_done in tests.items() if not is_done and test != died_of}
        for file, tests in work.items()
    }
    return {file: tests for file, tests in left.items() if tests}
