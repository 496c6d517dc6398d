"""Processes that a program starts with `multiprocessing`, which import its main module again."""

from __future__ import annotations

import multiprocessing

from popdist.errors import LifeCycleError


def refuse_while_spawned() -> None:
    """Stop a program that a process it has started runs again, before that takes part in the job as an instance.

    Raises:
        LifeCycleError: if `multiprocessing` is importing the program's main module; it says so itself only where
            that starts processes in turn.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LifeCycleError(
            "this process was started by the program (to load data, say), and has run the program again when it "
            "imported its main module; put what the program does under `if __name__ == '__main__':`"
        )
