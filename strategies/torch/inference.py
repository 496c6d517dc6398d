"""The local replicas of a module that is not trained, on threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from strategies.replicas.devices import THREADS
from strategies.roles import Batch, Tree
from strategies.torch.randomness import drawing_from, seed_of
from strategies.torch.replica_modules import ReplicaModule, slots_of


class InferenceReplicas:
    """Computes what a module says, in evaluation mode and without gradients, on copies that share its parameters.

    Args:
        replicas: global indices of the local ones.
        module: of which they are copies.
        call: (module, batch) -> outputs.
        seed: of random numbers.
    """

    def __init__(
        self, replicas: range, module: torch.nn.Module, call: Callable[[torch.nn.Module, Any], Tree], seed: int
    ) -> None:
        self._replicas = replicas
        self._module = module
        self._call = call
        self._seed = seed
        self._copies = [ReplicaModule(module) for _ in replicas]
        self._calls = 0
        at_once = min(len(replicas), len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(at_once, f"{THREADS}-torch", torch.set_num_threads, (1,))

    def __call__(self, rounds: Sequence[Sequence[Batch]]) -> list[list[Tree]]:
        """The outputs of each micro-batch and replica.

        Args:
            rounds: for each micro-batch, one after another, the batches of the local replicas.
        """
        masters = [slot.tensor for slot in slots_of(self._module)]
        for each in self._copies:
            each.follow()
            each.module.eval()
            with torch.no_grad():
                for slot, master in zip(each.slots, masters, strict=True):
                    slot.tensor.copy_(master)
        columns = zip(*rounds, strict=True)
        begun = [
            self._threads.submit(self._run, position, column, self._calls) for position, column in enumerate(columns)
        ]
        self._calls += 1
        return [list(of_replicas) for of_replicas in zip(*(each.result() for each in begun), strict=True)]

    def _run(self, position: int, batches: Sequence[Batch], number: int) -> list[Tree]:
        found = []
        for micro_batch, batch in enumerate(batches):
            seed = seed_of(self._seed, self._replicas[position], number, micro_batch)
            with torch.no_grad(), drawing_from(seed):
                found.append(self._call(self._copies[position].module, batch))
        return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)
