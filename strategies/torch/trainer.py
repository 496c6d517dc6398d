"""A trainer of PyTorch modules on all replicas of a strategy, and its checkpoints as state dictionaries of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch

import strategies.trees as trees
from popdist.records.recording import FOLDER_VARIABLE
from strategies.argument_checks import require_known_options
from strategies.checkpoints.checkpoint_folder import Best
from strategies.checkpoints.checkpoints import Checkpoints
from strategies.checkpoints.loading import find_checkpoint, load_part
from strategies.core.evaluation import Evaluation, Evaluator
from strategies.core.metrics import Metrics, StepNotice
from strategies.core.options import completed
from strategies.core.step import StepLoop, StepRules
from strategies.data.every_row import every_row
from strategies.jax.replicas.replicas import Replicas
from strategies.strategy import Strategy
from strategies.torch.agreement import agree_on_order, members_of_groups
from strategies.torch.engine import TorchEngine, flipped
from strategies.torch.options import TorchOptions, TorchTrainerOptions
from strategies.torch.replicas.buffers import OF_EACH
from strategies.torch.replicas.evaluation import MeansOfRows, OutputsOfRows
from strategies.torch.replicas.module_parts import stop_profiling
from strategies.torch.replicas.passes import LossFunction
from strategies.torch.tensors import HOST, as_tensor, chosen_here, keep_freed_memory, use_deterministic_operations
from strategies.torch.training import IS_MADE, TorchTraining, check_module, device_of, move
from strategies.torch.updates import GROUPS, PARAMS, STATE, TorchUpdate, check_module_optimizer, plain_number
from strategies.trees import rows_of
from strategies.typing import Batch, Tree
from strategies.values import TrainState

if TYPE_CHECKING:
    from strategies.jax.memory.plan import MemoryPlan
    from strategies.jax.step_record import StepRecorder
    from strategies.pipelines.plan import Trace


class Trainer:
    """A trainer of a module on all replicas of a strategy: `strategies.Trainer` for PyTorch.

        def loss_fn(module, batch):               # one replica, one micro-batch
            x, y = batch
            return torch.nn.functional.cross_entropy(module(x), y)

        trainer = strategies.torch.Trainer(strategy, module, loss_fn, torch.optim.Adam(module.parameters()))
        for epoch in range(3):
            for batch in dataset.epoch(epoch):    # of strategies.torch.distribute_dataset
                metrics = trainer.step(batch)

    Each step runs `loss_fn` once per local replica and micro-batch, with the module itself. Before each replica the
    buffers and attributes of the module are put back to those of the step's beginning, and all generators of random
    numbers are seeded. Gradients are averaged over all replicas in a fixed order. The optimizer makes one step per
    instance. Parameters, buffers and optimizer state have the same bits on every instance, and for every number of
    instances.

    The constructor is a collective call: all instances begin with the parameters and buffers of instance 0, and put the
    parts of the module in its order. The optimizer numbers its state, so its order must be the same everywhere.

    Args:
        strategy: The strategy whose replicas train.
        module: The module, which every step changes in place. If replicas compute on a device, the module and the state
            of the optimizer are moved there, as `module.to(device)` does.
        loss_fn: `(module, batch) -> loss`, `-> (loss, {name: scalar})`, `-> (loss, metrics, outputs)` or
            `-> strategies.Outcome` for one replica and one micro-batch.
        optimizer: An optimizer of `torch.optim`, or another one, of the module's parameters.
        seed: The seed of the random numbers in the module and in `loss_fn`.
        options: Other options by name; `TorchOptions` and its base class describe them.

    Attributes:
        module: The module that was given.
        optimizer: The optimizer that was given.
        seed: The seed that was given.

    Raises:
        TypeError: If `module` is not a module.
        ValueError: If an option is out of range or two of them exclude each other, no parameter is trained, or the
            optimizer has other parameters.
        StrategyError: If the module is on several devices, there is no such `replica_device`, or the optimizer's state
            is to be sharded and cannot be.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: torch.nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        seed: int = 0,
        **options: Unpack[TorchTrainerOptions],
    ) -> None:
        require_known_options(Trainer, options, TorchTrainerOptions.__annotations__)
        settings = completed(TorchOptions, strategy.defaults, {"seed": seed, **options})
        check_module(module)
        stop_profiling(module)
        check_module_optimizer(optimizer, module)
        if settings.device is None and (found := device_of(module)) != HOST:
            settings = replace(settings, replica_device=found)
        if settings.device is not None:
            if settings.device.type == "cuda" and strategy.defaults.deterministic:
                use_deterministic_operations(os.environ)
            move(module, optimizer, chosen_here(settings.device, strategy.replicas.instance.local_index))
        keep_freed_memory()
        self.module, self.optimizer = module, optimizer
        self.seed = seed
        self._strategy = strategy
        replicas = strategy.replicas
        agree_on_order(replicas, module)
        sharding = settings.replicated_optimizer_state_sharding
        update = TorchUpdate(replicas, optimizer, settings.min_elements_for_sharding if sharding else None)
        self._training = TorchTraining(replicas, module, optimizer, update, settings)
        recorder = _recorder_for(replicas, seed)
        self._loss_fn = loss_fn
        self._engine = TorchEngine(replicas, self._training, loss_fn, settings, recorder is not None)
        self._options = settings
        rules = StepRules(settings.digest_every, settings.check_numerics, settings.unrecoverable_part, flipped, rows_of)
        self._loop = StepLoop(replicas, self._engine, rules, settings.scaling, recorder)
        self._evaluator = Evaluator(replicas, self._engine, every_row, rules.unrecoverable_part, self._loop.transfer)
        self._loop.start(lambda: self._engine.share(self._training, 0), lambda: self._training)

    @property
    def notice(self) -> StepNotice:
        """The notice that travels with the gradients of every step."""
        return self._loop.notice

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas train."""
        return self._strategy

    @property
    def steps_made(self) -> int:
        """The number of updates so far."""
        return self._training.step

    @property
    def outputs(self) -> Sequence[Sequence[Tree]]:
        """The outputs that the loss function returned in the last step, for each local replica and micro-batch.

        Raises:
            SpareError: On a spare, which computes no outputs.
        """
        return self._engine.outputs

    def step(self, batch: Batch) -> Metrics:
        """Make one update of the module. Collective.

        Afterwards the `grad` of each parameter is its mean gradient. An error before the update leaves the module as it
        was; an error of the optimizer itself is final.

        Args:
            batch: The batch of this instance: a pytree of tensors or arrays, with the micro-batches of the local
                replicas one after another along the first axis.

        Returns:
            The means of the metrics over all replicas, weighted if the losses have weights.

        Raises:
            TypeError: If the loss is no floating-point scalar that depends on a parameter; or if a metric is called
                "loss".
            ValueError: If the batch cannot be divided evenly among replicas and micro-batches.
            StrategyError: If a gradient is sparse; if it is None on some replicas only, unless `missing_gradients` is
                "zero"; or if metrics change their names. On all instances, if a replica that computes again in step 1,
                2, 4, 8 and so on gets another loss, gradient or buffer, or writes a network outside of the module.
            WeightError: On all instances, if a weight of a loss is negative or not finite. Nothing is changed then.
            ZeroWeightError: On all instances, if all weights are 0, unless `zero_weight` is "skip".
            NonFiniteGradientError: If a gradient is not finite, with `check_numerics`. Nothing is changed then.
            DivergenceError: If instances have different bits, after steps 1, 2, 4, 8 and so on, or with `digest_every`.
            DisagreementError: On all instances, before the first step with batches of a shape, if they differ in the
                options, the data set, the module, the optimizer or the loss function.
        """
        return self._loop.make_step(self._training, batch)[1]

    def plan(self, batch: Batch) -> MemoryPlan:
        """Return the memory that this instance will need, as far as it is known before a step runs. Not collective.

        Unknown are the values that autograd keeps between the passes, and the loss function's metrics, of 4 bytes each.

        Args:
            batch: A batch of this instance.
        """
        return self._engine.planned(batch)

    @property
    def trace(self) -> Trace:
        """The actions of the local replicas' simulated devices in the last step of a pipeline.

        Raises:
            ValueError: If no step has followed a timetable yet; the first step learns the stages.
        """
        from strategies.pipelines.plan import Trace  # imports JAX

        return Trace(self._engine.spans)

    def run(self, dataset: Iterable[Batch]) -> Metrics:
        """Make a step with every batch, and return the metrics of the last one.

        Raises:
            ValueError: If there is no batch. `step` may raise other errors.
        """
        metrics = None
        for batch in dataset:
            metrics = self.step(batch)
        if metrics is None:
            raise ValueError("the data set has no batch; a run needs at least one")
        return metrics

    def evaluate(self, dataset: Iterable[Batch], fn: LossFunction | None = None) -> Evaluation:
        """Return the mean loss and metrics over all rows of a data set; every row counts once. Collective.

        Each replica computes the function for its rows of a batch, in evaluation mode and without gradients. Its means
        are weighted by the number of these rows, or by the weights of the losses if they have any. They are added in
        float64: over replicas in the order of the tree, and batch by batch. The bits depend on the number of replicas
        and the batch size, not on the instances.

        Args:
            dataset: A data set of `strategies.torch.distribute_dataset` with `remainder="pad"`, the rest of whose epoch
                is read. Or an iterable of batches of this instance; later batches may have fewer rows than the first.
            fn: A function like `loss_fn`; None for `loss_fn` itself.

        Raises:
            TypeError: If a loss or metric is no scalar.
            ValueError: If there is no row, or the data set leaves rows out or accumulates.
            DisagreementError: On all instances, if they evaluate different functions, modules or data.
        """
        return self._evaluator.evaluate(MeansOfRows(fn or self._loss_fn), self._training, dataset)

    def predict(
        self, dataset: Iterable[Batch], fn: LossFunction | None = None, *, to_all: bool = True
    ) -> Iterator[Tree]:
        """Yield the module's outputs for each row, in the order of the data. Taking a batch is a collective call.

        Args:
            dataset: A data set as `evaluate` takes it, with `shuffle=False`.
            fn: `(module, batch) -> outputs`, a pytree of tensors `[rows, ...]`; None for a `loss_fn` that returns
                outputs as its third value.
            to_all: Whether all instances get the outputs, as arrays. If not, all but instance 0 get None.

        Raises:
            ValueError: If there is no row, or the data set leaves rows out, accumulates or is shuffled, or the first
                axis of an output is not the rows.
            DisagreementError: On all instances, if they predict with different functions, modules or data.
        """
        task = OutputsOfRows(fn or self._loss_fn, is_loss=fn is None)
        return self._evaluator.predict(task, self._training, dataset, to_all)

    def scale_losses(self, scale: float) -> None:
        """Multiply the losses of later steps by `scale`, and divide mean gradients by it. Call it on all instances."""
        self._loop.scaling = self._engine.scale_losses(self._training, scale)

    def close(self) -> None:
        """Release the memory and the threads of steps. A later step starts new ones."""
        self._engine.close()

    # ---- checkpoints

    @property
    def state(self) -> TrainState:
        """Everything that training changes, as arrays for `strategies.Checkpoints`, valid until the next step."""
        return self._engine.snapshot(self._training)

    def restore(self, checkpoints: Checkpoints, *, other_replicas: bool = False) -> None:
        """Continue from the newest whole checkpoint, if there is one; see `Checkpoints.restore`. Collective."""
        state = self.state
        restored = checkpoints.restore(state, other_replicas=other_replicas)
        if restored is not state:
            self._engine.restore(restored)

    @property
    def order(self) -> Sequence[str]:
        """The names of the parameters, in the order in which the optimizer numbers them."""
        groups = members_of_groups(self.module, self.optimizer, self._training.update.wholes)
        return [name for members in groups.values() for name in members]

    @property
    def is_sharded(self) -> bool:
        """Whether instances have different parts of the optimizer's state."""
        return self._options.unrecoverable_part is not None

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` in place of every array that this instance has only in part."""
        return self._training.whole(state)


def _recorder_for(replicas: Replicas, seed: int) -> StepRecorder | None:
    """Return the recorder of the steps, or None unless the environment asks for a record."""
    if FOLDER_VARIABLE not in os.environ:
        return None
    from strategies.jax.options import StepOptions  # these import JAX
    from strategies.jax.step_record import recorder_for

    return recorder_for(replicas, StepOptions(seed))


# ---- state dictionaries


@dataclass(frozen=True)
class StateDicts:
    """A training in the form of plain PyTorch.

    Attributes:
        module: The argument for `module.load_state_dict`.
        optimizer: The argument for `optimizer.load_state_dict`, of an optimizer of the same kind.
    """

    module: dict[str, torch.Tensor]
    optimizer: dict[str, object]

    def save(self, file: str | Path) -> None:
        """Write both with `torch.save`, as `{"module": ..., "optimizer": ...}`."""
        torch.save({"module": self.module, "optimizer": self.optimizer}, file)


def load_state_dicts(path: str | Path, *, step: int | None = None, best: Best | None = None) -> StateDicts:
    """Load the state dictionaries from a checkpoint. No strategy, module or other instance is needed.

        found = strategies.torch.load_state_dicts("checkpoints")
        module.load_state_dict(found.module)

    Args:
        path: A folder of checkpoints, from which the newest whole one is read, or a single checkpoint.
        step: Read the folder's checkpoint of this step.
        best: Read the folder's best whole checkpoint.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
        ValueError: If both `step` and `best` are given.
    """
    checkpoint = find_checkpoint(path, step=step, best=best)
    arrays = load_part(checkpoint, ".variables") | load_part(checkpoint, ".model_state")
    module = {name: as_tensor(array) for name, array in arrays.items() if not name.endswith(OF_EACH)}
    return StateDicts(module, _optimizer(load_part(checkpoint, ".optimizer_state")))


def _optimizer(tree: Tree) -> dict[str, object]:
    """Return the optimizer's part of a tree in the form of `optimizer.state_dict`."""
    is_made = np.asarray(tree[IS_MADE])
    of_parameters = tree.get(STATE, {})
    numbered = enumerate(of_parameters) if isinstance(of_parameters, list) else of_parameters.items()
    state = {number: trees.map(as_tensor, values) for number, values in numbered if is_made[number]}
    groups = [
        {name: np.asarray(value).tolist() if name == PARAMS else plain_number(value) for name, value in group.items()}
        for group in tree[GROUPS]
    ]
    return {STATE: state, GROUPS: groups}
