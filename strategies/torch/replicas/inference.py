"""The turns of local replicas with a module that is not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch.jit import optimized_execution

from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.timetable import Timed
from strategies.torch.device import ReplicaMemory
from strategies.torch.memory import keep_freed_memory
from strategies.torch.pipelines.run import PipelineRun, Walk
from strategies.torch.pipelines.stages import TorchPipeline
from strategies.torch.replicas.attributes import Attributes
from strategies.torch.replicas.generators import Baton, kept_generators, seed_generators, seed_of
from strategies.torch.replicas.groups import ReplicaRows
from strategies.torch.replicas.guard import WriteMarks
from strategies.torch.replicas.module_parts import Slot, slots_of
from strategies.torch.replicas.sync_batch_norm import Seat
from strategies.torch.tensors import kept_apart
from strategies.torch.threads import intra_op_threads
from strategies.typing import Batch, Tree

OwnBuffers = Sequence[Mapping[int, torch.Tensor]]
"""For each local replica, the values of buffers that differ from those of the module, by the number of the slot."""


class InferenceTurns:
    """The computation of a module's outputs in evaluation mode, without gradients. Afterwards the module is as before.

    Args:
        replicas: The replicas of all instances.
        module: The module.
        memory: The memory in which replicas compute.
        call: (module, batch) -> outputs.
        seed: The seed of random numbers.
        pipeline: The pipeline in which the module's blocks run as stages; None to run them one after another.
        attributes: The attributes of the module in the replicas that train it; None if none do.

    Attributes:
        spans: The timed actions of the simulated devices in the last call, by local replica; empty without a pipeline.
        written: For each local replica, the buffers that the last call has written, by their numbers.
    """

    def __init__(
        self,
        replicas: Replicas,
        module: torch.nn.Module,
        memory: ReplicaMemory,
        call: Callable[[torch.nn.Module, Batch], Tree],
        seed: int,
        pipeline: TorchPipeline | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        keep_freed_memory()
        self._replicas, self._of_all = replicas.local_replicas, replicas.num_replicas_in_sync
        self._instruments = replicas.instruments
        self._module, self._memory, self._call, self._seed = module, memory, call, seed
        self._rows = [ReplicaRows(module, replica, self._of_all) for replica in self._replicas]
        self._seats = [Seat(replica, self._of_all, module, None) for replica in self._replicas]
        self._pipeline, self._attributes = pipeline, attributes or Attributes(module)
        self._run: PipelineRun | None = None
        self._rounds = 0  # the number of micro-batches for which `_run` was made
        self.spans: Mapping[int, Sequence[Timed]] = {}
        self.written: list[dict[int, torch.Tensor]] = []

    def __call__(
        self, rounds: Sequence[Sequence[Batch]], number: int, own: OwnBuffers | None = None
    ) -> list[list[Tree]]:
        """Return the outputs by micro-batch and replica.

        Args:
            rounds: For each micro-batch, the batches of the local replicas.
            number: The number of the call, on which random numbers depend.
            own: Buffers of the replicas that differ from those of the module.
        """
        if self._pipeline is not None and self._rounds != len(rounds):
            self.close()
            self._rounds = len(rounds)
            self._run = PipelineRun(self._pipeline, len(rounds), 1, self._module, False, self._instruments)
        slots = slots_of(self._module)
        changed = {number for of_replica in own or () for number in of_replica}
        kept = [
            (slot, slot.tensor.detach().clone())
            for number, slot in enumerate(slots)
            if not slot.is_parameter or number in changed
        ]
        marks = None if self._of_all == 1 else WriteMarks(list(self._module.named_parameters()), True)
        found: list[list[Tree]] = []
        self.written = []
        attributes = self._attributes
        attributes.follow()
        attributes.begin(self._replicas)
        before_all = attributes.view()
        with kept_generators(self._memory.device), intra_op_threads(1), _evaluating(self._module):
            view = attributes.view()
            for place, column in enumerate(zip(*rounds, strict=True)):
                with Baton(self._memory.device), ExitStack() as stack:
                    if len(self._replicas) > 1:
                        stack.enter_context(attributes.of(self._replicas[place]))
                        self._module.eval()
                    try:
                        for slot, value in (own[place] if own else {}).items():
                            slots[slot].put(value)
                        before = [(slot.tensor, slot.tensor._version) for slot in slots]
                        with self._rows[place].put():
                            found.append(self._outputs(place, column, number))
                        self.written.append(dict(_written(slots, before)))
                    finally:
                        for one, value in kept:
                            one.put(value)
                        stack.close()
                        attributes.put(view)
        attributes.put(before_all)
        if marks is not None:
            marks.refuse()
        if self._run is not None:
            self.spans = self._run.spans
        return [list(of_replicas) for of_replicas in zip(*found, strict=True)]

    def _outputs(self, place: int, batches: Sequence[Batch], number: int) -> list[Tree]:
        found: list[Tree] = [None] * len(batches)
        replica, seat, memory = self._replicas[place], self._seats[place], self._memory

        def work(micro_batch: int, walk: Walk | None) -> None:
            seed = seed_of(self._seed, replica, number, micro_batch)
            if walk is None or not walk.is_at_once:
                seed_generators(seed, memory.device)
            with torch.no_grad(), seat.taken(micro_batch), optimized_execution(False):
                rows = memory.put(batches[micro_batch])
                with nullcontext() if walk is None else walk.drawing(seed):
                    outputs = memory.fetched(self._call(self._module, rows))
                found[micro_batch] = kept_apart(outputs, self._module.buffers())
                if walk is not None:
                    walk.leave()

        if self._run is not None:
            self._run.each(work, replica)
            return found
        self._instruments.replica_begins(replica, 0)
        for micro_batch in range(len(batches)):
            work(micro_batch, None)
            self._instruments.replica_ends(replica, 0, micro_batch)
        return found

    def close(self) -> None:
        """End the threads of the pipeline."""
        if self._run is not None:
            self._run.close()
            self._run = None


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, without gradients for the code inside, and restore the modes of its parts."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, mode in modes:
            one.training = mode


def _written(slots: Sequence[Slot], before: Sequence[tuple[torch.Tensor, int]]) -> Iterator[tuple[int, torch.Tensor]]:
    for number, (slot, (tensor, version)) in enumerate(zip(slots, before, strict=True)):
        if not slot.is_parameter and (slot.tensor is not tensor or tensor._version != version):
            yield number, slot.tensor.detach().clone()
