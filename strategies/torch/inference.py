"""Local replicas of a module that is not trained, on threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.jit import optimized_execution

from strategies.jax.replicas.devices import THREADS
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.timetable import Timed
from strategies.torch.memory import keep_freed_memory
from strategies.torch.module_parts import slots_of
from strategies.torch.parameter_writes import WriteCounters, WrittenBits
from strategies.torch.pipeline_run import PipelineRun, Walk
from strategies.torch.randomness import drawing_from, seed_of
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.replica_modules import ReplicaModule
from strategies.torch.stages import TorchPipeline
from strategies.torch.sync_batch_norm import Seat
from strategies.typing import Batch, Tree


class InferenceReplicas:
    """The computation of a module's outputs in evaluation mode, on copies that share its parameters.

    Gradients are not computed.

    Args:
        replicas: The replicas of all instances.
        memory: The memory of the module and of its copies.
        call: (module, batch) -> outputs.
        seed: The seed of random numbers.
        pipeline: The pipeline in which the module's blocks run as stages; None to run them one after another.
        own: The names of the frozen parameters that each replica copies for itself.
    """

    def __init__(
        self,
        replicas: Replicas,
        memory: ReplicaMemory,
        call: Callable[[torch.nn.Module, Batch], Tree],
        seed: int,
        pipeline: TorchPipeline | None = None,
        own: frozenset[str] = frozenset(),
    ) -> None:
        keep_freed_memory()
        local, of_all = replicas.local_replicas, replicas.num_replicas_in_sync
        self._replicas = local
        self._memory = memory
        self._call = call
        self._seed = seed
        self._instruments = replicas.instruments
        self._pipeline = pipeline
        self._copies = [ReplicaModule(memory, replica, of_all, own) for replica in local]
        self._seats = [
            Seat(replica, of_all, one.module, None) for replica, one in zip(local, self._copies, strict=True)
        ]
        self._bits = WrittenBits(memory.parameters)
        self._writes = [WriteCounters(one.parameters) for one in self._copies]
        self._begun: list[list[tuple[torch.Tensor, int]]] = []  # tensors and their versions before a call
        self._runs: list[PipelineRun] = []
        self._rounds = 0  # the number of micro-batches for which `_runs` was made
        self._threads = ThreadPoolExecutor(memory.at_once(len(local)), f"{THREADS}-torch", torch.set_num_threads, (1,))

    def __call__(
        self,
        rounds: Sequence[Sequence[Batch]],
        number: int,
        buffers: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> list[list[Tree]]:
        """Return the outputs by micro-batch and replica.

        Args:
            rounds: For each micro-batch, the batches of the local replicas.
            number: The number of the call, on which random numbers depend.
            buffers: For each local replica, the buffers of its module; None for the module's own.
        """
        masters = buffers or [[slot.tensor for slot in slots_of(self._memory.module)]] * len(self._copies)
        self._memory.follow()
        for each, own in zip(self._copies, masters, strict=True):
            each.follow()
            each.module.eval()
            each.begin_with(own)
        self._begun = [[(slot.tensor, slot.tensor._version) for slot in each.slots] for each in self._copies]
        if self._pipeline is not None and self._rounds != len(rounds):
            self._new_runs(self._pipeline, len(rounds))
        columns = zip(*rounds, strict=True)
        self._bits.begin()
        begun = [self._threads.submit(self._run, position, column, number) for position, column in enumerate(columns)]
        found = [each.result() for each in begun]
        self._memory.refuse_writes(self._bits.written())
        return [list(of_replicas) for of_replicas in zip(*found, strict=True)]

    def written(self) -> list[dict[int, torch.Tensor]]:
        """Return, for each local replica, the buffers that the last call has written, by their numbers."""
        return [
            {
                number: slot.tensor.detach()
                for number, (slot, (tensor, version)) in enumerate(zip(each.slots, begun, strict=True))
                if not slot.is_parameter and (slot.tensor is not tensor or tensor._version != version)
            }
            for each, begun in zip(self._copies, self._begun, strict=True)
        ]

    @property
    def spans(self) -> Mapping[int, Sequence[Timed]]:
        """The timed actions of the simulated devices in the last call, by local replica; empty without a pipeline."""
        return {replica: run.spans for replica, run in zip(self._replicas, self._runs, strict=False) if run.spans}

    def _new_runs(self, pipeline: TorchPipeline, rounds: int) -> None:
        self._close_runs()
        self._rounds = rounds
        self._runs = [
            PipelineRun(pipeline, rounds, 1, copy.module, False, self._instruments, replica)
            for copy, replica in zip(self._copies, self._replicas, strict=True)
        ]

    def _run(self, position: int, batches: Sequence[Batch], number: int) -> list[Tree]:
        found: list[Tree] = [None] * len(batches)
        self._writes[position].begin()

        def work(micro_batch: int, walk: Walk | None) -> None:
            seed = seed_of(self._seed, self._replicas[position], number, micro_batch)
            seat, device = self._seats[position], self._memory.device
            drawing, here = drawing_from(seed, device), self._memory.current()
            with torch.no_grad(), here, seat.taken(micro_batch), drawing, optimized_execution(False):
                rows = self._memory.put(batches[micro_batch])
                found[micro_batch] = self._memory.fetched(self._call(self._copies[position].module, rows))
            if walk is not None:
                walk.leave()

        if self._runs:
            self._runs[position].each(work)
        else:
            replica = self._replicas[position]
            self._instruments.replica_begins(replica, 0)
            for micro_batch in range(len(batches)):
                work(micro_batch, None)
                self._instruments.replica_ends(replica, 0, micro_batch)
        self._copies[position].refuse_writes(self._writes[position].written())
        return found

    def _close_runs(self) -> None:
        for run in self._runs:
            run.close()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)
        self._close_runs()
