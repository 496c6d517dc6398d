"""PopTorch's models: a module, called with the rows of several updates at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

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
from strategies.pipelines.trace import Trace
from strategies.torch.gradient_map import MapGradient, multiplied
from strategies.torch.inference import InferenceReplicas
from strategies.torch.optimizer_arrays import numbers_of_groups, set_numbers
from strategies.torch.replica_groups import summed
from strategies.torch.replica_memory import ReplicaMemory
from strategies.torch.stages import TorchPipeline
from strategies.torch.tensors import parts_of, tensors_of
from strategies.torch.trainer import Trainer
from strategies.torch.training import refuse_other_devices
from strategies.typing import Batch, Tree

logger = logging.getLogger("strategies.torch.poptorch")


_SHARED = "models of a module share its parameters and buffers, which are read at every call"
_METHODS = methods_of(
    "PoplarExecutor",
    attachToDevice=Accepted(lambda: None, NO_IPU),
    compilationTime=Accepted(lambda: timedelta(), NO_COMPILER),
    copyNamedBuffersToDevice=Accepted(lambda: None, _SHARED),
    copyWeightsToDevice=Accepted(lambda: None, _SHARED),
    copyWeightsToHost=Accepted(lambda: None, _SHARED),
    copyWeightsToHostIfNeeded=Accepted(lambda: False, _SHARED),
    cycleCount=Refused("cycles of an IPU are not counted, as there is none; take the time around a call"),
    detachFromDevice=Accepted(lambda: None, NO_IPU),
    isAttachedToDevice=Accepted(lambda: True, NO_IPU),
    isCompiled=Accepted(lambda: True, NO_COMPILER),
    loadExecutable=Accepted(lambda filename: None, "what was compiled is no part of the file"),
)
"""Methods of a model with nothing to do; each returns the value of the table."""


class PoplarExecutor:
    """A module that `trainingModel` or `inferenceModel` has wrapped; call it with this instance's rows.

    The first axis of every tensor has the rows of micro-batch x replicas of this instance x gradient accumulation x
    device iterations: `poptorch.DataLoader` makes such batches. The rows of the replicas lie beside each other for each
    micro-batch, so the last rows are those of the last micro-batch.

    Attributes:
        model: the module, as the program made it; it is changed in place.
        options: see above.
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
            raise TypeError(f"the options are a {type(options).__name__}; give poptorch.Options(), or None for those")
        if isinstance(model, PoplarExecutor):
            model = model.model
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"the model is a {type(model).__name__}; give a torch.nn.Module, whose forward calls a function, say"
            )
        options._freeze()
        refuse_other_devices(model, "PopTorch's interface")
        make_groupable(model)
        self.model: torch.nn.Module = model
        self.options = options
        self._is_training = training
        self._map_gradient = map_gradient
        self._trainer: Trainer | None = None
        self._inference: InferenceReplicas | None = None
        self._calls = 0  # of an inference
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
                f"gradientAccumulation is {options.Training.gradient_accumulation}, and an inference accumulates none; "
                "options.clone() for it, with Training.gradientAccumulation(1)"
            )

    @property
    def trainer(self) -> Trainer:
        """The trainer that makes the updates, for `strategies.Checkpoints`.

        Raises:
            StrategyError: if it is an inference model.
        """
        if self._trainer is None:
            raise StrategyError("an inference model makes no updates; poptorch.trainingModel does")
        return self._trainer

    # ---- calls

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Return the module's outputs for these rows, as `Options.outputMode` says; a collective call if it trains.

        Raises:
            ValueError: if the rows cannot be divided.
            StrategyError: if there is no loss, or several.
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
        """The outputs that come back: unless it is said, those of the last micro-batch, or all of an inference."""
        if self.options.output_mode is not OutputMode.Default:
            return self.options.output_mode
        return OutputMode.Final if self._is_training else OutputMode.All

    def _rounds_of(self, batch: Batch) -> list[list[Batch]]:
        """Return the batches of the local replicas for each micro-batch of the call."""
        local = len(self.options.strategy.replicas.local_replicas)
        count = self.options.device_iterations * self.options.Training.gradient_accumulation
        if count * local == 1 and not self._is_training:
            return [[batch]]  # also tensors without axes
        try:
            parts = parts_of(batch, count * local)
        except ValueError as error:
            raise ValueError(
                f"{error}. There are deviceIterations {self.options.device_iterations} x gradientAccumulation "
                f"{self.options.Training.gradient_accumulation} x {local} replicas of this instance; use "
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
            self._inference = InferenceReplicas(
                self.options.strategy.replicas, ReplicaMemory(self.model), call, self.options.seed, self._pipeline()
            )
        self._calls += 1
        began_s = time.perf_counter()
        outputs = self._inference(rounds, self._calls - 1, self._states.masters)
        self._states.keep(self._inference.written())
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
            pipeline=None if running else self._pipeline(),  # nobody has asked for one then: `refuse_pairs`
        )

    def _pipeline(self) -> TorchPipeline:
        """Stages of the strategy; without one, of the blocks that have a device, where there are some."""
        strategy = self.options.execution_strategy
        if strategy is not None:
            return strategy.pipeline
        return TorchPipeline(lambda: FoundStages((), AutoStage.SameAsIpu, is_lenient=True), needs_full=False)

    @property
    def trace(self) -> Trace:
        """The work of the simulated devices in the last update, or the last call of an inference.

        `str`, `text` and `perfetto` of it show that.

        Raises:
            ValueError: if there was none; the first one learns the stages.
        """
        if self._trainer is not None:
            return self._trainer.trace
        return Trace(self._inference.spans if self._inference else {})

    # ---- what programs ask and tell it

    def getTensorNames(self) -> list[str]:
        """Return the names that `Options.anchorTensor` takes."""
        return names_of(self.model)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return an anchored tensor of the last call: after the last update, or as the anchor says.

        Raises:
            StrategyError: if it is none, or there was no call.
        """
        return self._anchored.of_call(short_name)

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Return the seconds at which the last call had each tensor of each update; only differences count.

        An "input" is asked for and "input_complete" when the update begins, an "output" and "output_complete" when it
        has ended, as nothing is transferred. An inference counts as one update.
        """
        return self._counters.events()

    def getLatency(self) -> Latency:
        """Return least, most and mean seconds of the updates of the last call, or of that call of an inference.

        Raises:
            StrategyError: if there was no call.
        """
        return self._counters.of_updates()

    getComputeLatency = getLatency  # all of it is computing

    def getHostIpuLatency(self) -> Latency:
        """Return zeros: inputs and outputs are where they are needed.

        Raises:
            StrategyError: if there was no call.
        """
        self._counters.of_updates()
        return 0.0, 0.0, 0.0

    getIpuHostLatency = getHostIpuLatency

    @property
    def rng_state(self) -> list[int]:
        """The seed, and the number of updates, or of calls of an inference: all random numbers follow from these.

        An inference may be told another number of calls; a training has its number of updates from its checkpoint.

        Raises:
            StrategyError: if it is set to another seed, or a training to another number.
        """
        return [self.options.seed, self._calls if self._trainer is None else self._trainer.steps_made]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        seed, made = state
        if seed != self.options.seed:
            raise StrategyError(
                f"the seed of this model is {self.options.seed}, and the state has {seed}; make the model with "
                f"options.randomSeed({seed})"
            )
        if self._trainer is None:
            self._calls = made
        elif made != self._trainer.steps_made:
            raise StrategyError(
                f"{self._trainer.steps_made} updates were made, and the state is that after {made}; random numbers "
                "follow the number of updates, which strategies.Checkpoints saves and restores with the training"
            )

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the numbers of an optimizer, such as its learning rate; its state stays what it was.

        Changes of the optimizer that the model was made with act at once, without this call.

        Raises:
            StrategyError: if it is of another kind, has other groups or parameters, or limits gradients that are cut
                into parts.
        """
        mine, groups = self.trainer.optimizer, optimizer.param_groups
        if type(optimizer) is not type(mine) or len(optimizer.param_groups) != len(mine.param_groups):
            raise StrategyError(
                f"the model was made with {type(mine).__name__} of {len(mine.param_groups)} groups, and this is "
                f"{type(optimizer).__name__} of {len(optimizer.param_groups)}; make another model with it"
            )
        if optimizer is not mine and [[id(one) for one in group["params"]] for group in groups] != self._updates:
            raise StrategyError(
                "the optimizer has other parameters in its groups than the one with which the model was made, which go "
                "on being trained; make another model with it"
            )
        scale, limit = scale_and_limit(optimizer)
        if limit != self._clipping.limit and self._shards:
            raise StrategyError(
                f"max_grad_norm is {limit}, the norm of whole gradients, and with useReplicatedTensorSharding an "
                "instance has parts of them; make another model with this optimizer"
            )
        if scale != self._scale:
            refuse_pairs(self.options, scale)
            self.trainer.scale_losses(scale)
        self._scale, self._clipping.limit = scale, limit
        if optimizer is not mine:
            set_numbers(mine, numbers_of_groups(optimizer))

    def compile(self, *args: Tree, **kwargs: Tree) -> None:
        """Look at the rows; nothing is compiled."""
        self._rounds_of(tensors_of((args, kwargs)))

    def compileAndExport(
        self,
        filename: str | Path,
        *args: Tree,
        export_model: bool = True,
        save_rng_state: bool = True,
        **kwargs: Tree,
    ) -> None:
        """Look at the rows, and `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model, save_rng_state)

    def destroy(self) -> None:
        """End the threads of the replicas; a call begins new ones."""
        if self._trainer is not None:
            self._trainer.close()
        if self._inference is not None:
            self._inference.close()
            self._inference = None

    def save(self, filename: str | Path, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the module, the options and the optimizer, as `load` reads them.

        Args:
            filename: of the file.
            export_model: False for parameters and state alone; they can only be loaded into a model then.
            save_rng_state: accepted: the seed is among the options, and a model that is loaded begins anew.

        Raises:
            StrategyError: if the state of the optimizer is sharded, and is to be in the file; or there is a
                `map_gradient`, which no file has.
        """
        require_switches(export_model=export_model, save_rng_state=save_rng_state)
        if export_model and self._shards:
            raise StrategyError(
                "the state of the optimizer is sharded, and a file would have this instance's part of it; use "
                "strategies.Checkpoints(folder, training.trainer), or export_model=False"
            )
        if export_model and self._map_gradient is not None:
            raise StrategyError(
                "a file has no functions, and a model loaded from it would train without map_gradient; use "
                "export_model=False, make the model with trainingModel(..., map_gradient=...), and load its state_dict"
            )
        content = {"state": self.model.state_dict(), "options": self.options, "training": self._is_training}
        if export_model:
            optimizer = None if self._trainer is None else packed(self._trainer.optimizer)
            content |= {"model": self.model, "optimizer": optimizer}
        torch.save(content, filename)

    def train(self, mode: bool = True) -> PoplarExecutor:
        """Set the mode of the module, and that in which a training model trains."""
        require_switches(mode=mode)
        self.model.train(mode)
        self._modes.take()
        return self

    def eval(self) -> PoplarExecutor:
        """Set the mode of the module."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        """Return what a table has, or else of the module: `state_dict`, `parameters`, submodules."""
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
    """Make a model whose calls make updates; a collective call.

    Args:
        model: returns a loss: a scalar that `identity_loss` has marked, or else the last scalar of what it returns.
        options: frozen from here on.
        optimizer: of its parameters; None for SGD with a learning rate of 0.01.
        map_gradient: None, or a function of each micro-batch's gradients, see `TorchOptions`; PopTorch has none.
    """
    return PoplarExecutor(model, options, True, optimizer, map_gradient)


def inferenceModel(model: torch.nn.Module | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    """Make a model that is called in evaluation mode, without gradients, and shares the parameters of the module.

    Args:
        model: a module, or a model of it.
        options: frozen from here on.
    """
    return PoplarExecutor(model, options, False, None)


def load(
    filename: str | Path, edit_opts_fn: Callable[[Options], object] | None = None, *, is_trusted: bool = False
) -> PoplarExecutor:
    """Make the model that `PoplarExecutor.save` has written; classes of the file are those that are imported already.

    Args:
        filename: of the file.
        edit_opts_fn: changes the options before the model is made.
        is_trusted: True for a file that may run code, as a program does.

    Raises:
        StrategyError: if the file has no model, is damaged, or needs to be trusted.
    """
    require_switches(is_trusted=is_trusted)
    content = read_model(filename, is_trusted)
    if "model" not in content:
        raise StrategyError(f"{filename} was saved with export_model=False; make the model, and load its state_dict")
    options = content["options"].clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    return PoplarExecutor(content["model"], options, content["training"], unpacked(content["optimizer"]))
