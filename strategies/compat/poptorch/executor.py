"""PopTorch's models: a module that is called with the rows of several updates at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from popdist.switches import require_switches
from strategies.compat.poptorch.autocasting import heeded_by
from strategies.compat.poptorch.blocks import FoundStages
from strategies.compat.poptorch.enums import AutoStage, MeanReductionStrategy, OutputMode, ReductionType
from strategies.compat.poptorch.module_state import Modes, WrittenBuffers, make_groupable
from strategies.compat.poptorch.optimizer_base import (
    Clipping,
    refuse_pairs,
    scale_and_limit,
    shards_state,
    tell_rounding,
)
from strategies.compat.poptorch.options import Options
from strategies.compat.poptorch.outputs import (
    Anchored,
    joined,
    loss_function,
    names_of,
    outputs_and_losses,
    put_together,
    refuse_unknown,
)
from strategies.compat.poptorch.profiling import Counters, Latency
from strategies.compat.poptorch.saved_models import packed, read_model, unpacked
from strategies.compat.poptorch.without_effect import NO_COMPILER, NO_IPU, Accepted, Refused, methods_of
from strategies.core.options import GradientAccumulationReductionMethod as Method
from strategies.errors import StrategyError
from strategies.loss_scaling import LossScaling
from strategies.torch.device import ReplicaMemory
from strategies.torch.optimizer_arrays import numbers_of_groups, set_numbers
from strategies.torch.pipelines.stages import TorchPipeline
from strategies.torch.replicas.gradient_map import MapGradient, multiplied
from strategies.torch.replicas.groups import summed
from strategies.torch.replicas.inference import InferenceTurns
from strategies.torch.tensors import parts_of, tensors_of
from strategies.torch.trainer import Trainer
from strategies.torch.training import refuse_other_devices
from strategies.typing import Batch, Tree

if TYPE_CHECKING:
    from strategies.pipelines.trace import Trace

logger = logging.getLogger("strategies.torch.poptorch")


_SHARED = "all models of a module share its parameters and buffers, which are read at every call"
_METHODS = methods_of(
    "PoplarExecutor",
    attachToDevice=Accepted(lambda: None, NO_IPU),
    compilationTime=Accepted(lambda: timedelta(), NO_COMPILER),
    copyNamedBuffersToDevice=Accepted(lambda: None, _SHARED),
    copyWeightsToDevice=Accepted(lambda: None, _SHARED),
    copyWeightsToHost=Accepted(lambda: None, _SHARED),
    copyWeightsToHostIfNeeded=Accepted(lambda: False, _SHARED),
    cycleCount=Refused("there is no IPU whose cycles could be counted; measure the time of a call"),
    detachFromDevice=Accepted(lambda: None, NO_IPU),
    isAttachedToDevice=Accepted(lambda: True, NO_IPU),
    isCompiled=Accepted(lambda: True, NO_COMPILER),
    loadExecutable=Accepted(lambda filename: None, "the file has no compiled programs"),
)
"""Methods of a model with nothing to do; each returns its value in this table."""


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
                f"the model is a {type(model).__name__}; give a torch.nn.Module, for example one whose forward calls a "
                "function"
            )
        options._freeze()
        refuse_other_devices(model, "PopTorch's interface")
        make_groupable(model)
        self.model: torch.nn.Module = model
        self.options = options
        self._is_training = training
        self._map_gradient = map_gradient
        self._trainer: Trainer | None = None
        self._inference: InferenceTurns | None = None
        self._calls = 0  # calls of an inference model
        self._counters = Counters()
        self._modes = Modes(model)
        self._states = WrittenBuffers(model, options.strategy.replicas)
        if training:
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        self._shards = optimizer is not None and shards_state(options, optimizer)
        refuse_unknown(options.anchors, model, self._shards, options.device_iterations)
        mode, every, count = self._mode, options.output_every, options.Training.gradient_accumulation
        followed = {short: anchor.following(mode, every, count) for short, anchor in options.anchors.items()}
        self._anchored = Anchored(followed, model)
        if optimizer is not None:
            self._scale, limit = scale_and_limit(optimizer)
            self._clipping = Clipping(limit)
            self._updates = [[id(one) for one in group["params"]] for group in optimizer.param_groups]
            tell_rounding(options, optimizer, model)
            self._trainer = self._new_trainer(optimizer)
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
        self._counters.begin(batch)
        if self._is_training:
            with self._modes.kept():
                rounds = self._train(batch)
        else:
            rounds = self._infer(batch)
        outputs = put_together(rounds, self._mode, self.options.output_every)
        self._counters.end(outputs)
        return outputs

    @property
    def _mode(self) -> OutputMode:
        """The mode of outputs; by default the last micro-batch for training, and all for inference."""
        if self.options.output_mode is not OutputMode.Default:
            return self.options.output_mode
        return OutputMode.Final if self._is_training else OutputMode.All

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
            began_s = time.perf_counter()
            rounds = every[iteration * count : (iteration + 1) * count]
            in_order = [each for of_replica in zip(*rounds, strict=True) for each in of_replica]
            self.trainer.step(joined(in_order))
            self._counters.add(began_s, time.perf_counter())
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
        began_s = time.perf_counter()
        outputs = self._inference(rounds, self._calls - 1, self._states.own)
        self._states.keep(self._inference.written)
        self._counters.add(began_s, time.perf_counter())
        return outputs

    def _new_trainer(self, optimizer: torch.optim.Optimizer) -> Trainer:
        options, training = self.options, self.options.Training
        is_sum = training.reduction is ReductionType.Sum
        factor = options.strategy.replicas.num_replicas_in_sync if is_sum else 1
        mapping = None if self._map_gradient is None else multiplied(self._map_gradient, factor)
        running = training.mean_strategy is MeanReductionStrategy.Running and not is_sum
        of_optimizer = options.TensorLocations.of_optimizer
        refuse_pairs(options, self._scale)
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
            min_elements_for_sharding=int(str(of_optimizer.get("minElementsForReplicatedTensorSharding", 32))),
            before_update=None if self._shards else self._clipping,
            pipeline=None if running else self._pipeline(),  # `refuse_pairs` has refused an execution strategy
        )

    def _pipeline(self) -> TorchPipeline:
        """Return the pipeline of the execution strategy, or else of the blocks that have a device."""
        strategy = self.options.execution_strategy
        if strategy is not None:
            return strategy.pipeline
        return TorchPipeline(lambda: FoundStages((), AutoStage.SameAsIpu, is_lenient=True), needs_full=False)

    @property
    def trace(self) -> Trace:
        """The timed work of the simulated devices in the last update, or in the last call of an inference model.

        Its `str`, `text` and `perfetto` show it.

        Raises:
            ValueError: If nothing has run yet; the first call finds the stages.
        """
        if self._trainer is not None:
            return self._trainer.trace
        from strategies.pipelines.trace import Trace  # imports JAX

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

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Return the times in seconds of each tensor in each update of the last call; only differences have a meaning.

        "input" and "input_complete" are the start of the update, "output" and "output_complete" its end, because
        nothing is transferred. A call of an inference model counts as one update.
        """
        return self._counters.events()

    def getLatency(self) -> Latency:
        """Return the minimum, maximum and mean seconds of the last call's updates; an inference call is one update.

        Raises:
            StrategyError: If the model was not called.
        """
        return self._counters.of_updates()

    getComputeLatency = getLatency  # a call only computes

    def getHostIpuLatency(self) -> Latency:
        """Return zeros, because inputs and outputs are not transferred.

        Raises:
            StrategyError: If the model was not called.
        """
        self._counters.of_updates()
        return 0.0, 0.0, 0.0

    getIpuHostLatency = getHostIpuLatency

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
                f"the seed of this model is {self.options.seed}, but the state has {seed}; make the model with "
                f"options.randomSeed({seed})"
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
                "the parameters in the optimizer's groups are not those that the model trains; make a new model with "
                "this optimizer"
            )
        scale, limit = scale_and_limit(optimizer)
        if limit != self._clipping.limit and self._shards:
            raise StrategyError(
                f"max_grad_norm is {limit}, which needs whole gradients, but with useReplicatedTensorSharding an "
                "instance has only parts of them; make a new model with this optimizer"
            )
        if scale != self._scale:
            refuse_pairs(self.options, scale)
            self.trainer.scale_losses(scale)
        self._scale, self._clipping.limit = scale, limit
        if optimizer is not mine:
            set_numbers(mine, numbers_of_groups(optimizer))

    def compile(self, *args: Tree, **kwargs: Tree) -> None:
        """Check the number of rows; nothing is compiled."""
        self._rounds_of(tensors_of((args, kwargs)))

    def compileAndExport(
        self,
        filename: str | Path,
        *args: Tree,
        export_model: bool = True,
        save_rng_state: bool = True,
        **kwargs: Tree,
    ) -> None:
        """Check the number of rows, and call `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model, save_rng_state)

    def destroy(self) -> None:
        """End the threads of the replicas; the next call starts new ones."""
        if self._trainer is not None:
            self._trainer.close()
        if self._inference is not None:
            self._inference.close()
            self._inference = None

    def save(self, filename: str | Path, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the module, the options and the optimizer to a file for `load`.

        Args:
            filename: Path of the file.
            export_model: False writes only parameters and state, which an existing model can load.
            save_rng_state: Accepted without effect: options include the seed, and a loaded model starts anew.

        Raises:
            StrategyError: If `export_model` is True, and optimizer state is sharded or the model has a `map_gradient`,
                which no file can hold.
        """
        require_switches(export_model=export_model, save_rng_state=save_rng_state)
        if export_model and self._shards:
            raise StrategyError(
                "optimizer state is sharded, so a file would hold only this instance's part; use "
                "strategies.Checkpoints(folder, training.trainer), or export_model=False"
            )
        if export_model and self._map_gradient is not None:
            raise StrategyError(
                "a file cannot hold functions, and a model loaded from it would train without map_gradient; use "
                "export_model=False, make the model with trainingModel(..., map_gradient=...), and load its state_dict"
            )
        content = {"state": self.model.state_dict(), "options": self.options, "training": self._is_training}
        if export_model:
            optimizer = None if self._trainer is None else packed(self._trainer.optimizer)
            content |= {"model": self.model, "optimizer": optimizer}
        torch.save(content, filename)

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
            return partial(_METHODS[name].called, name)
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_METHODS]

    def __repr__(self) -> str:
        kind = "trainingModel" if self._is_training else "inferenceModel"
        return f"poptorch.{kind}({self.model}, {self.options})"


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


def load(
    filename: str | Path, edit_opts_fn: Callable[[Options], object] | None = None, *, is_trusted: bool = False
) -> PoplarExecutor:
    """Make the model that `PoplarExecutor.save` wrote; the program must have imported the classes in the file.

    Args:
        filename: Path of the file.
        edit_opts_fn: Function that changes the options before the model is made.
        is_trusted: True for a file that may run code, as a program does.

    Raises:
        StrategyError: If the file has no model, is damaged, or can only be read with `is_trusted=True`.
    """
    require_switches(is_trusted=is_trusted)
    content = read_model(filename, is_trusted)
    if "model" not in content:
        raise StrategyError(f"{filename} was saved with export_model=False; make a model and load its state_dict")
    options = content["options"].clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    return PoplarExecutor(content["model"], options, content["training"], unpacked(content["optimizer"]))
