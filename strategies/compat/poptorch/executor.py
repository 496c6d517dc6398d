"""PopTorch's models: a module that is called with the rows of several updates at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from popdist.switches import require_switches
from strategies.compat.poptorch.blocks import ExecutionStrategy, FoundStages
from strategies.compat.poptorch.modules import (
    Anchored,
    Modes,
    joined,
    keep_buffers,
    loss_function,
    make_groupable,
    names_of,
    outputs_and_losses,
    put_together,
)
from strategies.compat.poptorch.names import (
    NO_COMPILER,
    NO_IPU,
    RECORDED,
    AutoStage,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    Rows,
    TableRow,
    refused,
)
from strategies.compat.poptorch.operations import heeded_by
from strategies.compat.poptorch.optim import Clipping, check_conflicts, log_rounding, scale_and_limit, shards_state
from strategies.compat.poptorch.options import Options, TensorLocationSettings
from strategies.core.options import GradientAccumulationReductionMethod as Method
from strategies.errors import StrategyError
from strategies.loss_scaling import LossScaling
from strategies.torch.data import parts_of, tensors_of
from strategies.torch.pipelines import TorchPipeline
from strategies.torch.replicas.evaluation import InferenceTurns
from strategies.torch.replicas.gradient_map import MapGradient, multiplied, summed
from strategies.torch.tensors import ReplicaMemory
from strategies.torch.trainer import Trainer
from strategies.torch.training import check_on_cpu
from strategies.torch.updates import numbers_of_groups, set_numbers
from strategies.typing import Batch, Tree

if TYPE_CHECKING:
    from strategies.pipelines.plan import Trace

logger = logging.getLogger("strategies.torch.poptorch")


_SHARED = "all models of a module share its parameters and buffers, which are read at every call"
_TIMES = f"times of updates are not kept; measure a call with time.perf_counter, or {RECORDED}"
_FILES = (
    "files of whole models are not written; save model.state_dict() with torch.save, or the training with "
    "strategies.Checkpoints(folder, training.trainer)"
)
_METHODS: Rows = {
    **dict.fromkeys(("attachToDevice", "detachFromDevice"), TableRow(lambda: None, NO_IPU)),
    **dict.fromkeys(
        ("copyNamedBuffersToDevice", "copyWeightsToDevice", "copyWeightsToHost"), TableRow(lambda: None, _SHARED)
    ),
    "copyWeightsToHostIfNeeded": TableRow(lambda: False, _SHARED),
    "isAttachedToDevice": TableRow(lambda: True, NO_IPU),
    "compilationTime": TableRow(lambda: timedelta(), NO_COMPILER),
    "isCompiled": TableRow(lambda: True, NO_COMPILER),
    "loadExecutable": TableRow("filename", "the file has no compiled programs", lambda name, value: None),
    **dict.fromkeys(("compileAndExport", "save"), refused(_FILES)),
    "cycleCount": refused("there is no IPU whose cycles could be counted; measure the time of a call"),
    **dict.fromkeys(
        ("getComputeLatency", "getHostIpuLatency", "getIpuHostLatency", "getLatency", "getPerfCounters"),
        refused(_TIMES),
    ),
}
"""Methods of a model with nothing to do, each of which returns its value in this table, and refused ones."""


class PoplarExecutor:
    """A module wrapped by `trainingModel` or `inferenceModel`; call it with this instance's rows.

    The first axis of every tensor has micro-batch x local replicas x gradient accumulation x device iterations rows, as
    batches of `poptorch.DataLoader` have. Rows are ordered by micro-batch, and inside a micro-batch by replica.

    Example::

        model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
        for rows, labels in poptorch.DataLoader(options, dataset, batch_size=16):
            outputs, loss = model(rows, labels)

    Attributes:
        model: The program's module; updates change it in place.
        options: Options of the model, frozen.
    """

    def __init__(
        self,
        model: torch.nn.Module | PoplarExecutor,
        options: Options | None,
        training: bool,
        optimizer: torch.optim.Optimizer | None,
        map_gradient: MapGradient | None = None,
    ) -> None:
        options = Options() if options is None else options
        if not isinstance(options, Options):
            raise TypeError(
                f"the options are a {type(options).__name__}; give poptorch.Options(), or None for the default options"
            )
        if isinstance(model, PoplarExecutor):
            model = model.model
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"the model is a {type(model).__name__}; give a torch.nn.Module, such as one whose forward calls it"
            )
        options._freeze()
        check_on_cpu(model, "PopTorch's interface")
        make_groupable(model)
        self.model: torch.nn.Module = model
        self.options = options
        self._is_training = training
        self._trainer: Trainer | None = None
        self._inference: InferenceTurns | None = None
        self._calls = 0  # calls of an inference model
        self._modes = Modes(model)
        replicas = options.strategy.replicas
        self._buffers: list[dict[int, torch.Tensor]] | None = None  # those of each of several replicas
        if replicas.num_replicas_in_sync > 1:
            self._buffers = [{} for _ in replicas.local_replicas]
        if training:
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        self._shards = optimizer is not None and shards_state(options, optimizer)
        self._mode = options.output_mode
        if options.defaultOutputMode():
            self._mode = OutputMode.Final if training else OutputMode.All
        self._anchored = Anchored(options, model, self._mode, self._shards)
        if optimizer is not None:
            self._scale, limit = scale_and_limit(optimizer)
            self._clipping = Clipping(limit)
            self._updates = [[id(one) for one in group["params"]] for group in optimizer.param_groups]
            log_rounding(options, optimizer, model)
            self._trainer = self._new_trainer(optimizer, map_gradient)
        elif options.Training.gradient_accumulation != 1:
            raise StrategyError(
                f"gradientAccumulation is {options.Training.gradient_accumulation}, but an inference model accumulates "
                "nothing; give it options.clone() with Training.gradientAccumulation(1)"
            )

    @property
    def trainer(self) -> Trainer:
        """The trainer that makes the updates, for `strategies.Checkpoints`.

        Raises:
            StrategyError: If this is an inference model.
        """
        if self._trainer is None:
            raise StrategyError("an inference model has no trainer; make the model with poptorch.trainingModel")
        return self._trainer

    # ---- calls

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Return the module's outputs for these rows, as `Options.outputMode` says. Collective for a training model.

        Raises:
            ValueError: If the number of rows cannot be divided.
            StrategyError: If the module returns no loss, or several.
        """
        batch = tensors_of((args, kwargs))
        if self._is_training:
            with self._modes.kept():
                rounds = self._train(batch)
        else:
            rounds = self._infer(batch)
        return put_together(rounds, self._mode, self.options.output_every)

    def _rounds_of(self, batch: Batch) -> list[list[Batch]]:
        """Return the batches of the local replicas, by micro-batch of the call."""
        local = len(self.options.strategy.replicas.local_replicas)
        count = self.options.device_iterations * self.options.Training.gradient_accumulation
        if count * local == 1 and not self._is_training:
            return [[batch]]  # a batch may have tensors without axes
        try:
            parts = parts_of(batch, count * local)
        except ValueError as error:
            raise ValueError(
                f"{error}. Their number is deviceIterations {self.options.device_iterations} x gradientAccumulation "
                f"{self.options.Training.gradient_accumulation} x {local} local replicas; use "
                "poptorch.DataLoader"
            ) from None
        return [parts[number * local : (number + 1) * local] for number in range(count)]

    def _train(self, batch: Batch) -> list[list[Tree]]:
        every = self._rounds_of(batch)
        count = self.options.Training.gradient_accumulation
        if self.options.Training.reduction is ReductionType.Sum:
            for parameter in self.model.parameters():
                summed(parameter)
        found: list[list[Tree]] = []
        self._anchored.begin()
        for iteration in range(self.options.device_iterations):
            rounds = every[iteration * count : (iteration + 1) * count]
            in_order = [each for of_replica in zip(*rounds, strict=True) for each in of_replica]
            self.trainer.step(joined(in_order))
            self._anchored.look()
            found += [list(of_replicas) for of_replicas in zip(*self.trainer.outputs, strict=True)]
            if self._mode is OutputMode.Final:
                found = found[-1:]
        return found

    def _infer(self, batch: Batch) -> list[list[Tree]]:
        rounds = self._rounds_of(batch)
        if self._inference is None:
            autocasts = self.options.Precision.autocasts
            call = heeded_by(lambda *called: outputs_and_losses(*called)[0], autocasts)
            self._inference = InferenceTurns(
                self.options.strategy.replicas, self.model, ReplicaMemory(), call, self.options.seed, self._pipeline()
            )
        self._calls += 1
        outputs = self._inference(rounds, self._calls - 1, self._buffers)
        keep_buffers(self.model, self._buffers, self._inference.written)
        return outputs

    def _new_trainer(self, optimizer: torch.optim.Optimizer, map_gradient: MapGradient | None) -> Trainer:
        options, training = self.options, self.options.Training
        is_sum = training.reduction is ReductionType.Sum
        factor = options.strategy.replicas.num_replicas_in_sync if is_sum else 1
        mapping = None if map_gradient is None else multiplied(map_gradient, factor)
        running = training.mean_strategy is MeanReductionStrategy.Running and not is_sum
        location = options.TensorLocations.optimizer or TensorLocationSettings()
        check_conflicts(options, self._scale)
        scaling = LossScaling(self._scale, 1.0) if self._scale != 1 else None
        if training.automatic_loss_scaling:
            scaling = LossScaling() if self._scale == 1 else LossScaling(self._scale)
        return Trainer(
            options.strategy,
            self.model,
            loss_function(1 if mapping else factor, options.Precision.autocasts),
            optimizer,
            options.seed,
            check_numerics=options.Precision.checks_numerics,
            gradient_accumulation_count=training.gradient_accumulation,
            map_gradient=mapping,
            reduction_method=Method.SUM if is_sum else Method.RUNNING_MEAN if running else Method.MEAN,
            loss_scaling=scaling,
            replicated_optimizer_state_sharding=self._shards,
            min_elements_for_sharding=location.min_elements,
            before_update=None if self._shards else self._clipping,
            pipeline=None if running else self._pipeline(),
        )

    def _pipeline(self) -> TorchPipeline:
        """Return the pipeline of the execution strategy, or else of the blocks that have a device."""
        strategy: ExecutionStrategy | None = self.options.execution_strategy
        if strategy is not None:
            return strategy.pipeline
        return TorchPipeline(lambda: FoundStages((), AutoStage.SameAsIpu, is_lenient=True), needs_full=False)

    @property
    def trace(self) -> Trace:
        """The timed work of the simulated devices in the last update, or in the last call of an inference model.

        Its `str` draws it.

        Raises:
            ValueError: If nothing has run yet; the first call finds the stages.
        """
        if self._trainer is not None:
            return self._trainer.trace
        from strategies.pipelines.plan import Trace  # imports JAX

        return Trace(self._inference.spans if self._inference else {})

    # ---- questions and settings of programs

    def getTensorNames(self) -> list[str]:
        """Return the names of tensors that `Options.anchorTensor` accepts."""
        return names_of(self.model)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return an anchored tensor of the last call: after the last update, or as the anchor's mode says.

        Raises:
            StrategyError: If no tensor is anchored under this name, or the model was not called.
        """
        return self._anchored.of_call(short_name)

    @property
    def rng_state(self) -> list[int]:
        """The seed and the number of updates or inference calls, which determine all random numbers.

        The number of inference calls can be set. The number of updates of a training comes from its checkpoint only.

        Raises:
            StrategyError: If another seed is set, or another number of updates.
        """
        return [self.options.seed, self._calls if self._trainer is None else self._trainer.steps_made]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        seed, made = state
        if seed != self.options.seed:
            raise StrategyError(
                f"the model has the seed {self.options.seed}, but the state {seed}; use options.randomSeed({seed})"
            )
        if self._trainer is None:
            self._calls = made
        elif made != self._trainer.steps_made:
            raise StrategyError(
                f"the model has made {self._trainer.steps_made} updates, but the state is from after {made}; random "
                "numbers follow the number of updates: save and restore the training with strategies.Checkpoints"
            )

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the hyperparameters of an optimizer, such as its learning rate; the optimizer state stays.

        Changes to the model's own optimizer take effect at once, without this call.

        Raises:
            StrategyError: If the class, the groups or the parameters differ, or if a new `max_grad_norm` needs whole
                gradients but they are sharded.
        """
        mine, groups = self.trainer.optimizer, optimizer.param_groups
        if type(optimizer) is not type(mine) or len(optimizer.param_groups) != len(mine.param_groups):
            raise StrategyError(
                f"the model was made with {type(mine).__name__} of {len(mine.param_groups)} groups, but this is "
                f"{type(optimizer).__name__} of {len(optimizer.param_groups)}; make a new model with this optimizer"
            )
        if optimizer is not mine and [[id(one) for one in group["params"]] for group in groups] != self._updates:
            raise StrategyError(
                "the optimizer's parameters are not those that the model trains; make a new model with this optimizer"
            )
        scale, limit = scale_and_limit(optimizer)
        if limit != self._clipping.limit and self._shards:
            raise StrategyError(
                f"max_grad_norm is {limit}, which needs whole gradients, but with useReplicatedTensorSharding an "
                "instance has only parts of them; make a new model with this optimizer"
            )
        if scale != self._scale:
            check_conflicts(self.options, scale)
            self.trainer.scale_losses(scale)
        self._scale, self._clipping.limit = scale, limit
        if optimizer is not mine:
            set_numbers(mine, numbers_of_groups(optimizer))

    def compile(self, *args: Tree, **kwargs: Tree) -> None:
        """Check the number of rows; nothing is compiled."""
        self._rounds_of(tensors_of((args, kwargs)))

    def destroy(self) -> None:
        """End the threads of the replicas; the next call starts new ones."""
        if self._trainer is not None:
            self._trainer.close()
        if self._inference is not None:
            self._inference.close()
            self._inference = None

    def train(self, mode: bool = True) -> PoplarExecutor:
        """Set the module's mode, and with it the mode of a training model's calls."""
        require_switches(mode=mode)
        self.model.train(mode)
        self._modes.take()
        return self

    def eval(self) -> PoplarExecutor:
        """Set the module to evaluation mode, and with it a training model's calls."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the table, or else an attribute of the module: `state_dict`, `parameters`, submodules."""
        if name in _METHODS:
            return partial(_METHODS[name].value, "PoplarExecutor", name)
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_METHODS]

    def __repr__(self) -> str:
        kind = "trainingModel" if self._is_training else "inferenceModel"
        return f"poptorch.{kind}({self.model}, {self.options!r})"


def trainingModel(
    model: torch.nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    map_gradient: MapGradient | None = None,
) -> PoplarExecutor:
    """Make a model whose calls train the module. Collective.

    Args:
        model: Module that returns a loss: a scalar marked by `identity_loss`, or else the only scalar that depends on
            its parameters.
        options: Options of the model, frozen from here on.
        optimizer: Optimizer of the module's parameters; None for SGD with a learning rate of 0.01.
        map_gradient: Function applied to the gradients of each micro-batch as in `TorchOptions`, or None; an addition
            to PopTorch.
    """
    return PoplarExecutor(model, options, True, optimizer, map_gradient)


def inferenceModel(model: torch.nn.Module | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    """Make a model for evaluation without gradients, which shares the module's parameters.

    Args:
        model: Module, or a model of it.
        options: Options of the model, frozen from here on.
    """
    return PoplarExecutor(model, options, False, None)
