"""Loaders that deal the rows of a DataLoader to replicas: each replica's batches are those of a process of its own."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import cast, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler
from typing_extensions import override

from strategies.data.datasets import DistributedDataset
from strategies.errors import DisagreementError, StrategyError
from strategies.strategy import Strategy
from strategies.torch.agreement import gather_objects
from strategies.torch.data import DistributedSampler, parts_of
from strategies.torch.lightning.resuming import states_of, write_states
from strategies.torch.replicas.generators import drawing_from, seed_generators, seed_of
from strategies.torch.tensors import HOST
from strategies.typing import Batch, Tree


@final
class ReplicaBatches:
    """The batches of the local replicas. Hooks such as `on_train_batch_start` get it in place of a batch.

        for replica, batch in batches.items():
            ...

    Args:
        of_each: The batch of each local replica that has rows in this step, by the replica's global index.
        is_whole: Whether every replica of all instances has rows. In the last step of an evaluation some may have none.

    Attributes:
        is_whole: The argument.
    """

    def __init__(self, of_each: Mapping[int, Batch], is_whole: bool = True) -> None:
        self._of_each = dict(of_each)
        self.is_whole = is_whole

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the batches, in the order of the replicas."""
        return iter(self._of_each.values())

    def __len__(self) -> int:
        """Return the number of local replicas with rows."""
        return len(self._of_each)

    def __getitem__(self, replica: int) -> Batch:
        """Return the batch of a replica, given its global index."""
        return self._of_each[replica]

    def items(self) -> Iterator[tuple[int, Batch]]:
        """Return an iterator over the global indices of replicas and their batches."""
        return iter(self._of_each.items())

    def map(self, function: Callable[[int, Batch], Batch]) -> ReplicaBatches:
        """Return the results of `function(replica, batch)` in place of the batches."""
        return ReplicaBatches({one: function(one, batch) for one, batch in self.items()}, self.is_whole)


def is_sharded(batch: object) -> bool:
    """Return whether a batch has batches of replicas in it; an example of a model's input has none."""
    return any(isinstance(one, ReplicaBatches) for one in tree_leaves(batch))


def by_replica(batch: object) -> ReplicaBatches:
    """Return batches of several loaders, in a dictionary, list or tuple, as one batch of such a kind for each replica.

    Raises:
        StrategyError: If a batch was not dealt to replicas, or the replicas of two loaders differ.
    """
    parts, structure = tree_flatten(batch)
    there = [one for one in parts if isinstance(one, ReplicaBatches)]
    are_dealt = all(isinstance(one, ReplicaBatches | None) for one in parts)  # None: a loader that has ended
    if there and are_dealt and all(dict(one.items()).keys() == dict(there[0].items()).keys() for one in there):
        return there[0].map(lambda replica, _: tree_unflatten([one and one[replica] for one in parts], structure))
    raise StrategyError(
        f"the strategy 'popdist' got a batch of type {type(batch).__name__} that was not dealt to replicas; give "
        "Lightning a DataLoader, and let training_step take the batch, not the iterator of the loader"
    )


_NOBODY = -1  # the replica in the seeds of numbers that all replicas share
_OF_ORDER, _OF_WORKERS = 2**40, 2**41  # the steps in the seeds of an epoch's order and of its workers
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)
"""The options of a DataLoader that the loaders of replicas share with it."""


@dataclass(frozen=True)
class ShardingRule:
    """The assignment of an epoch's units to replicas. A unit is a row, or a batch of the program's batch sampler.

    Step s takes units `[s * B * R, (s + 1) * B * R)` of the epoch's order, for batch size B and R replicas. Replica r
    takes the r-th part of them. In training, the parts of the last step are equal, too: if units are missing, those at
    the beginning of the order are repeated. In an evaluation every unit counts once, so the last parts may be smaller,
    or empty.

    Attributes:
        length: The number of units.
        batch_size: Units of a replica in a step.
        replicas: The number of replicas of all instances.
        is_training: Whether all replicas get equally many units.
        drops: Whether units that fill no batch are left out.
    """

    length: int
    batch_size: int
    replicas: int
    is_training: bool
    drops: bool

    @property
    def global_batch_size(self) -> int:
        """The number of units that all replicas take in one step."""
        return self.batch_size * self.replicas

    @property
    def used(self) -> int:
        """The number of units that are not left out."""
        whole = self.global_batch_size if self.is_training else self.batch_size
        return self.length - self.length % whole if self.drops else self.length

    @property
    def steps(self) -> int:
        """The number of steps of an epoch."""
        return math.ceil(self.used / self.global_batch_size)

    def is_whole(self, step: int) -> bool:
        """Return whether all replicas have units in a step."""
        return self.is_training or self.used - step * self.global_batch_size > self.batch_size * (self.replicas - 1)

    def positions(self, step: int, replica: int) -> Sequence[int]:
        """Return the places in the order of the units that a replica takes in a step."""
        first = step * self.global_batch_size
        there = min(self.global_batch_size, self.used - first)
        if self.is_training:
            each = math.ceil(there / self.replicas)
            return [place % self.used for place in range(first + replica * each, first + (replica + 1) * each)]
        start = first + replica * self.batch_size
        return range(start, min(start + self.batch_size, self.used))


class ReplicaLoader(ABC):
    """A loader that gives `ReplicaBatches`, and whose place in an epoch Lightning saves in its checkpoints."""

    def __init__(self) -> None:
        self._epoch = 0
        self._begun = 0  # the epoch that is read
        self._given = 0  # the number of its batches that were given
        self._resumed: Mapping[str, Tree] | None = None  # the state of a checkpoint, until the next iteration

    @property
    def sampler(self) -> ReplicaLoader:
        """The object on which Lightning calls `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Select the order that the next iteration reads."""
        self._epoch = epoch

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps of an epoch."""

    @abstractmethod
    def read(self, epoch: int, start: int, continues: bool) -> Iterator[ReplicaBatches]:
        """Yield the batches of an epoch from a step on.

        Args:
            epoch: The number of the epoch.
            start: The number of the step.
            continues: Whether the pass of the loaded state goes on.
        """

    def __iter__(self) -> Iterator[ReplicaBatches]:
        """Yield the batches of the epoch that `set_epoch` selects before the first batch is taken."""
        resumed, self._resumed = self._resumed, None
        continues = resumed is not None and resumed["epoch"] == self._epoch
        self._begun, self._given = self._epoch, resumed["given"] if continues and resumed is not None else 0
        for batches in self.read(self._begun, self._given, continues):
            self._given += 1
            yield batches

    def state_dict(self) -> dict[str, Tree]:
        """Return the epoch, and the number of its batches that were given."""
        return dict(self._resumed or {"epoch": self._begun, "given": self._given})

    def load_state_dict(self, state: Mapping[str, Tree]) -> None:
        """Begin the next iteration after the batches that were given, if it reads the same epoch."""
        self._resumed = state


@final
class _Units(list[object]):
    """The units of a batch. A worker that receives them draws from generators with their seed from then on.

    So the rows do not depend on earlier batches of the worker, which a resumed training does not read.
    """

    def __init__(self, units: Iterable[object], seed: int) -> None:
        super().__init__(units)
        self._seed = seed

    @override
    def __reduce__(self) -> tuple[Callable[..., list[object]], tuple[int, list[object]]]:
        """Pickle the units as a call of `_received`: torch's loader sends batches to its workers by pickle only."""
        return _received, (self._seed, [*self])


def _received(seed: int, units: list[object]) -> list[object]:
    seed_generators(seed, HOST)
    return units


class _PlannedUnits(list[_Units]):
    """The batches of the next iteration, which takes them when it begins."""

    @override
    def __iter__(self) -> Iterator[_Units]:
        return iter(self[:])


@dataclass(frozen=True)
class _Pass:
    """One reading of the rows of an epoch.

    Attributes:
        epoch: The number of the epoch.
        number: The number of the pass in the epoch; in evaluations, see `ShardedLoader`.
        states: The states of the sampler before its order was drawn.
        order: The units in order.
    """

    epoch: int
    number: int
    states: Mapping[str, Tree]
    order: Sequence[object]

    @cached_property
    def digest(self) -> str:
        """A digest of the order."""
        return hashlib.blake2b(repr(self.order).encode(), digest_size=16).hexdigest()


@final
class ShardedLoader(ReplicaLoader):
    """A DataLoader's rows, sharded over replicas; each local replica reads with its own loader.

    The order of an epoch is that of the loader's sampler. It must be the same on all instances, and instances compare
    it. Random numbers that data sets draw depend on the seed, the epoch, the pass, the replica and the step. In
    training, the passes of an epoch are counted.

    Args:
        loader: The program's loader.
        strategy: The strategy whose replicas read.
        seed: The seed of shuffling and of data sets that draw random numbers.
        pass_now: Returns the number of the pass that begins. If it is negative, the sampler draws the same order again
            in the next pass. Default: training, see `ShardingRule`.

    Raises:
        StrategyError: If the rows cannot be dealt.
    """

    def __init__(
        self, loader: DataLoader[object], strategy: Strategy, seed: int, pass_now: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        is_training = pass_now is None
        self._units, rows = _units_of(loader)
        self._has_rows = rows > 0
        self._name = "rows" if self._has_rows else "batches"
        drops = loader.drop_last if self._has_rows else is_training
        replicas = strategy.num_replicas_in_sync
        try:
            length = len(self._units)  # type: ignore[arg-type]
        except TypeError as error:
            raise StrategyError(
                f"{type(self._units).__name__} has no length, so its rows cannot be dealt to replicas; give it __len__"
            ) from error
        self._rule = ShardingRule(length, max(1, rows), replicas, is_training, drops)
        if is_training and not self._rule.steps:
            raise StrategyError(
                f"one step of {replicas} replicas takes {self._rule.global_batch_size} {self._name}, but the loader "
                f"has {length}, and incomplete steps are dropped; use a smaller batch_size or fewer replicas"
                + (", or drop_last=False" if self._has_rows else "")
            )
        self._strategy, self._seed = strategy, seed
        self._loaders = {replica: _copied(loader) for replica in strategy.local_replicas}
        self._pass_now = pass_now
        self._pass: _Pass | None = None  # the last one that was begun

    @override
    def __len__(self) -> int:
        return self._rule.steps

    @override
    def read(self, epoch: int, start: int, continues: bool) -> Iterator[ReplicaBatches]:
        begun = self._pass = self._pass if continues and self._pass is not None else self._next_pass(epoch)
        iterators = {replica: self._begin(replica, begun, start) for replica in self._loaders}
        for step in range(start, self._rule.steps):
            batches = {}
            for replica, iterator in iterators.items():
                if self._rule.positions(step, replica):
                    with drawing_from(self._seed_of(replica, begun, step), HOST):
                        batches[replica] = next(iterator)
            yield ReplicaBatches(batches, self._rule.is_whole(step))

    def _next_pass(self, epoch: int) -> _Pass:
        """Begin to read an epoch. Collective."""
        last = self._pass if self._pass is not None and self._pass.epoch == epoch else None
        if self._pass_now is None:
            number = 0 if last is None else last.number + 1
        else:
            number = self._pass_now()
            if last is not None and last.number == number >= 0:
                return last  # a validation that begins again
        begun = self._drawn(epoch, number)
        if number < 0:
            write_states(self._units, begun.states)
        return begun

    @override
    def state_dict(self) -> dict[str, Tree]:
        """Return also the pass, a digest of its order, and the states of the sampler before it and now."""
        if (begun := self._pass) is None or begun.number < 0:
            return super().state_dict()
        states = {"pass": begun.number, "order": begun.digest}
        if begun.states:
            states |= {"before": begun.states, "now": states_of(self._units)}
        return super().state_dict() | states

    @override
    def load_state_dict(self, state: Mapping[str, Tree]) -> None:
        """Draw the order of the state's pass again, and warn if another one comes out. Collective."""
        if self._pass_now is None:  # an evaluation begins anew
            super().load_state_dict(state)
        if "pass" not in state:
            units = self._units
            is_of_torch = type(units).__module__ == Sampler.__module__ and not isinstance(units, BatchSampler)
            if state["given"] and not (is_of_torch and not states_of(units)):  # else the seed and the epoch decide
                self._warn("the checkpoint was written by an earlier version, which did not save the sampler")
            return
        write_states(self._units, state.get("before", {}))
        self._pass = self._drawn(state["epoch"], state["pass"])
        if self._pass.digest != state["order"]:
            self._warn(f"it draws another order for epoch {state['epoch']} than before the checkpoint")
        write_states(self._units, state.get("now", {}))

    def _warn(self, reason: str) -> None:
        rank_zero_warn(
            f"the {self._name} after this resume may not be those of a training without a stop, because of "
            f"{type(self._units).__name__}: {reason}; use the data and seeds of that training, and keep the random "
            "state of a sampler in a generator of PyTorch, NumPy or Python that is its attribute, or give it "
            "state_dict and load_state_dict"
        )

    def _drawn(self, epoch: int, number: int) -> _Pass:
        """Draw the order of a pass. Collective."""
        states, set_epoch = states_of(self._units), getattr(self._units, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with drawing_from(seed_of(self._seed, _NOBODY, epoch, _OF_ORDER + number), HOST):
            order = list(self._units)
        if len(order) < self._rule.length:
            raise StrategyError(
                f"{type(self._units).__name__} gave {len(order)} of {self._rule.length} {self._name}; its length must "
                "be the number that an iteration gives"
            )
        begun = _Pass(epoch, number, states, order)
        found = gather_objects(self._strategy.communicator, begun.digest, "order of an epoch's rows")
        if others := [str(instance) for instance, one in enumerate(found) if one != found[0]]:
            raise DisagreementError(
                f"instances {', '.join(others)} draw another order of {self._name} than instance 0; use the same data "
                "set and seeds everywhere, as seed_everything gives them, and samplers without a generator of their own"
            )
        return begun

    def _begin(self, replica: int, begun: _Pass, start: int) -> Iterator[Batch]:
        loader, rule = self._loaders[replica], self._rule
        planned = []
        for step in range(start, rule.steps):
            if chosen := [begun.order[place] for place in rule.positions(step, replica)]:
                units = chosen if self._has_rows else cast(list[object], chosen[0])
                planned.append(_Units(units, self._seed_of(replica, begun, step)))
        cast(_PlannedUnits, loader.batch_sampler)[:] = planned
        loader.generator.manual_seed(seed_of(self._seed, replica, begun.epoch, _OF_WORKERS + begun.number))
        return iter(loader)

    def _seed_of(self, replica: int, begun: _Pass, step: int) -> int:
        return seed_of(self._seed, replica, begun.epoch, (begun.number << 32) + step)


def _units_of(loader: DataLoader[object]) -> tuple[Iterable[object], int]:
    """Return the sampler to shard, and the rows per batch; 0 if it is a sampler of batches."""
    if isinstance(loader.dataset, IterableDataset):
        raise StrategyError(
            "an IterableDataset gives its rows in order, so they cannot be dealt to replicas; use a data set with "
            "__getitem__ and __len__, or give Lightning strategies.torch.distribute_dataset(...) for training"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise StrategyError(
            f"{type(loader).__name__} has an __iter__ of its own, which would not see how rows are dealt to replicas; "
            "use a torch.utils.data.DataLoader with a sampler or collate_fn"
        )
    if isinstance(loader.sampler, TorchSampler):
        raise StrategyError(
            "the DataLoader has torch's DistributedSampler, but the strategy 'popdist' deals the rows to replicas by "
            "itself; leave out the sampler, and write shuffle=True"
        )
    if loader.batch_sampler is None:
        raise StrategyError("a DataLoader with batch_size=None cannot be dealt to replicas; give it a batch_size")
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return loader.sampler, loader.batch_size
    return loader.batch_sampler, 0


def _copied(loader: DataLoader[object]) -> DataLoader[object]:
    """Return a loader of the same data set with batches that are set later."""
    options = {name: getattr(loader, name) for name in _OPTIONS}
    return DataLoader(loader.dataset, batch_sampler=_PlannedUnits(), generator=torch.Generator(), **options)


@final
class SplitLoader(ReplicaLoader):
    """The batches of an instance, split into one part per local replica.

    Args:
        source: A data set of `distribute_dataset`, or a DataLoader with a `strategies.torch.DistributedSampler`.
        strategy: The strategy whose replicas read.
    """

    def __init__(self, source: DistributedDataset | DataLoader[object], strategy: Strategy) -> None:
        super().__init__()
        self._source, self._strategy = source, strategy

    @override
    def __len__(self) -> int:
        return len(self._source)

    @override
    def read(self, epoch: int, start: int, continues: bool) -> Iterator[ReplicaBatches]:
        source, local = self._source, self._strategy.local_replicas
        if isinstance(source, DistributedDataset):
            source.restore(replace(source.position(), epoch=epoch, step=start))
            batches: Iterator[Batch] = source.epoch(epoch)
        else:
            source.sampler.set_epoch(epoch)  # type: ignore[attr-defined, unused-ignore]
            batches = islice(source, start, None)
        for batch in batches:
            yield ReplicaBatches(dict(zip(local, parts_of(batch, len(local)), strict=True)))


def sharded_loader(
    loader: Tree, strategy: Strategy, seed: int, *, pass_now: Callable[[], int] | None, injects: bool
) -> ReplicaLoader:
    """Return a loader of `ReplicaBatches` for a loader of the program.

    Args:
        loader: The program's loader.
        strategy: The strategy whose replicas read.
        seed: See `ShardedLoader`.
        pass_now: See `ShardedLoader`.
        injects: The `use_distributed_sampler` of Lightning's Trainer.

    Raises:
        StrategyError: If the rows cannot be dealt to replicas.
    """
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if isinstance(loader, DistributedDataset) or isinstance(sampler, DistributedSampler):
        if pass_now is not None:
            raise StrategyError(
                "an evaluation counts every row once, but a data set of distribute_dataset and a DistributedSampler "
                "drop or repeat rows; give validate, test and predict a plain torch.utils.data.DataLoader"
            )
        if isinstance(loader, DistributedDataset) and (loader.gradient_accumulation_count > 1 or loader.pads):
            raise StrategyError(
                "Lightning takes one micro-batch of each replica at once; write Trainer(accumulate_grad_batches=...) "
                "in place of gradient_accumulation_count, and remainder='drop'"
            )
        if isinstance(sampler, DistributedSampler) and loader.batch_size != sampler.instance_batch_size:
            raise StrategyError(
                f"the DataLoader has batch_size={loader.batch_size}, but its DistributedSampler gives this instance "
                f"{sampler.instance_batch_size} rows in a step; write DataLoader(dataset, sampler.instance_batch_size, "
                "sampler=sampler)"
            )
        return SplitLoader(loader, strategy)
    if not isinstance(loader, DataLoader):
        raise StrategyError(
            f"a {type(loader).__name__} cannot be dealt to replicas; give Lightning a torch.utils.data.DataLoader of a "
            "data set with __getitem__ and __len__, or strategies.torch.distribute_dataset(...) for training"
        )
    if not injects and strategy.num_replicas_in_sync > 1:
        raise StrategyError(
            "use_distributed_sampler=False lets every process read what it likes, but the strategy 'popdist' deals "
            "rows to replicas, which are no processes; leave it out, or give the DataLoader a "
            "strategies.torch.DistributedSampler"
        )
    return ShardedLoader(loader, strategy, seed, pass_now)
