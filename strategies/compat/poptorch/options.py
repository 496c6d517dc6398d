"""PopTorch's options of a model: a table of all of them, and the objects that read it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import strategies.compat.poptorch.names as names
from strategies.argument_checks import at_least, positive
from strategies.compat.poptorch.blocks import ExecutionStrategy
from strategies.compat.poptorch.names import (
    NO_COMPILER,
    NO_IPU,
    ONE_MEMORY,
    RECORDED,
    Anchor,
    CommGroupType,
    ConfigFileError,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    Rows,
    Settable,
    TableRow,
    anything,
    log_once,
    refused,
    switch,
)
from strategies.compat.poptorch.operations import Policy
from strategies.data.randomness import of_program
from strategies.errors import FailedPreconditionError, StrategyError
from strategies.job_strategies import LocalStrategy, PopDistStrategy
from strategies.strategy import Strategy

COMPILED_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's variable for the folder of compiled programs."""

logger = logging.getLogger("strategies.torch.poptorch")

# ---- accepted values


def _gradients(name: str, value: ReductionType) -> ReductionType:
    if value not in (ReductionType.Sum, ReductionType.Mean):
        raise ValueError(f"the reduction of gradients is {value!r}; use ReductionType.Sum or .Mean")
    return ReductionType(value)


def _stages(name: str, value: object) -> ExecutionStrategy:
    if not isinstance(value, ExecutionStrategy):
        raise TypeError(f"{value!r} is not an execution strategy; use poptorch.PipelinedExecution(...)")
    return value


def _own_rows(input_group_size: int, input_group_type: CommGroupType) -> int:
    """Return the size of groups of replicas with the same rows; refuse groups of several replicas."""
    if CommGroupType(input_group_type) is CommGroupType.All:
        raise ValueError("replicas with the same rows compute the same result; use CommGroupType.NoGrouping")
    if CommGroupType(input_group_type) is not CommGroupType.NoGrouping and input_group_size != 1:
        raise StrategyError(
            f"groups of {input_group_size} replicas should get the same rows, but every replica has its own rows "
            "here; repeat the rows in the data set, or use CommGroupType.NoGrouping"
        )
    return input_group_size


def _without_lists(name: str, value: object) -> Policy | None:
    if value is not None and not isinstance(value, Policy):
        raise TypeError(f"the policy is {value!r}; give poptorch.autocasting.Policy(), or None")
    if value is not None and value.lists:
        raise StrategyError(
            f"the policy lists operators ({', '.join(value.lists)}), but torch.autocast has its own list for CPUs; "
            "leave the policy out, and cast in the model"
        )
    return value


def _upcast(name: str, value: HalfFloatCastingBehavior) -> HalfFloatCastingBehavior:
    if value is HalfFloatCastingBehavior.FloatDowncastToHalf:
        raise StrategyError(
            "PyTorch promotes float16 and float32 to float32, but FloatDowncastToHalf would do the opposite; cast in "
            "the model, or use HalfUpcastToFloat"
        )
    return value


def _location(name: str, value: object) -> TensorLocationSettings:
    if not isinstance(value, TensorLocationSettings):
        raise TypeError(
            f"the location is {value!r}; give poptorch.TensorLocationSettings(), for example with "
            ".useReplicatedTensorSharding()"
        )
    return value


# ---- the table

_BY_HAND = "processes cannot be numbered by hand; start them with poprun, and use popdist.poptorch.Options()"


def _decided(call: str, what: str) -> TableRow:
    """Return the row of a method that poprun makes needless. As in the original, the error is a RuntimeError."""
    words = f"Cannot call `{call}` with popdist.poptorch.Options: poprun has decided {what}"
    return refused(words, FailedPreconditionError)


_OF_NUMBERS = {
    "accumulationAndReplicationReductionType": "Options.Training.accumulationAndReplicationReductionType",
    "accumulationFactor": "Options.Training.gradientAccumulation",
    "automaticLossScalingSettings.enabled": "Options.Training.setAutomaticLossScaling",
    "enableFloatingPointChecks": "Options.Precision.enableFloatingPointExceptions",
    "enableGradientAccumulation": "Options.Training.gradientAccumulation",
    "enableReplicatedGraphs": "Options.replicationFactor",
    "globalReplicationFactor": "popdist.poptorch.Options() under poprun",
    "groupNormStridedChannelGrouping": "torch.nn.GroupNorm as it is, which groups neighbouring channels",
    "meanAccumulationAndReplicationReductionStrategy": (
        "Options.Training.setMeanAccumulationAndReplicationReductionStrategy"
    ),
    "replicatedGraphCount": "Options.replicationFactor",
}
"""Options of the compiler that change results of training, with their replacements."""
_AHEAD = TableRow("value", "batches that a DataLoader makes ahead", positive, "buffers")
_REDUCTION = TableRow(
    "reduction_type",
    "reduction of gradients over micro-batches and replicas",
    _gradients,
    "reduction",
    ReductionType.Mean,
)

TABLE: dict[str, Rows] = {
    "Options": {
        "anchorMode": TableRow(None, "older name of outputMode", anything, "output_mode", OutputMode.Default),
        "anchorTensor": TableRow(None, "tensors that getAnchoredTensor returns", anything, "anchors", {}),
        "appendToLocationExcludes": TableRow(lambda *excludes: excludes, NO_COMPILER),
        "autoRoundNumIPUs": TableRow(lambda auto_round_num_ipus=True: auto_round_num_ipus, NO_IPU, switch),
        "broadcastBuffers": TableRow(
            lambda broadcast_buffers=True: broadcast_buffers, "buffers are equal on all instances", switch
        ),
        "connectionType": TableRow("connection_type", NO_IPU),
        "deviceIterations": TableRow(
            "device_iterations", "number of updates in a call", positive, "device_iterations", 1
        ),
        "disableModuleNamescope": TableRow(lambda: True, NO_COMPILER),
        "enableExecutableCaching": TableRow(None, "folder of programs compiled by torch.compile", anything, "cache"),
        "enableProfiling": TableRow(lambda profile_dir=None: profile_dir, RECORDED, level=logging.WARNING),
        "enableStableNorm": TableRow("enabled", "PyTorch computes normalisations in two passes", switch),
        "enableSyntheticData": TableRow("enabled", "data are not copied to a device", switch),
        "inputReplicaGrouping": TableRow(_own_rows, "every replica has its own rows"),
        "loadFromFile": refused(
            "option files are not read; call the options of its lines in the program, or give them as JSON to from_json"
        ),
        "logCycleCount": TableRow("log_cycle_count", NO_IPU, switch),
        "logDir": TableRow("log_dir", NO_COMPILER),
        "maxRepeatLogs": TableRow("max_lines", "the log does not repeat lines"),
        "modelName": TableRow("name", NO_COMPILER),
        "outputMode": TableRow(
            None, "micro-batches whose outputs a call returns", anything, "output_mode", OutputMode.Default
        ),
        "randomSeed": TableRow(None, "seed of random numbers and of shuffling", anything, "seed", 0),
        "relaxOptimizerAttributesChecks": TableRow(lambda relax=True: relax, "all hyperparameters may change", switch),
        "replicationFactor": TableRow(
            "replication_factor", "number of replicas of this process", positive, "replication_factor", 1
        ),
        "setAvailableMemoryProportion": TableRow(
            "available_memory_proportion", NO_IPU, lambda name, value: dict(value)
        ),
        "setExecutionStrategy": TableRow("strategy", "stages of a model", _stages, "execution_strategy"),
        "showCompilationProgressBar": TableRow(lambda show=True: show, NO_COMPILER, switch),
        "sourceLocationExcludes": TableRow("excludes", NO_COMPILER, lambda name, value: list(value)),
        "syncPattern": TableRow("sync_pattern", NO_IPU),
        "updatableNamedBuffers": TableRow("buffers", "buffers are read at every call", lambda name, value: list(value)),
        "useIpuId": TableRow("ipu_id", NO_IPU),
        "useIpuModel": TableRow("use_model", NO_IPU, switch),
        "useOfflineIpuTarget": TableRow(lambda ipu_version=2: ipu_version, NO_IPU),
    },
    "Options.Training": {
        "accumulationAndReplicationReductionType": _REDUCTION,
        "accumulationReductionType": _REDUCTION,  # the name before PopTorch 2.3
        "gradientAccumulation": TableRow(
            "gradient_accumulation", "number of micro-batches in an update", positive, "gradient_accumulation", 1
        ),
        "setAutomaticLossScaling": TableRow(
            "enabled", "dynamic scaling of losses, as by LossScaling", switch, "automatic_loss_scaling", False
        ),
        "setConvolutionDithering": TableRow("enabled", "convolutions are not spread over tiles", switch),
        "setMeanAccumulationAndReplicationReductionStrategy": TableRow(
            "mean_reduction_strategy",
            "Post divides each loss by the number of micro-batches, Running rescales gradients before each",
            lambda name, value: MeanReductionStrategy(value),
            "mean_strategy",
            MeanReductionStrategy.Post,
        ),
    },
    "Options.Precision": {
        "autocastEnabled": TableRow("autocast_enabled", "effect of poptorch.autocast", switch, "autocasts", True),
        "autocastPolicy": TableRow("autocast_policy", "torch.autocast has its own list for CPUs", _without_lists),
        "enableFloatingPointExceptions": TableRow(
            "enabled", "NonFiniteGradientError for infinities and NaN", switch, "checks_numerics", False
        ),
        "enableStochasticRounding": TableRow("enabled", "PyTorch rounds to nearest, in float32", switch),
        "halfFloatCasting": TableRow("half_float_casting", "PyTorch promotes float16 to float32", _upcast),
        "runningStatisticsAlwaysFloat": TableRow("value", "buffers keep their dtypes", switch),
        "setPartialsType": TableRow("dtype", "PyTorch chooses the dtype of partial sums"),
    },
    "Options.Jit": {"traceModel": TableRow("trace_model", "no model is traced: its forward runs as written", switch)},
    "Options.TensorLocations": {
        "numIOTiles": TableRow("num_tiles", NO_IPU),
        "setAccumulatorLocation": TableRow("location", ONE_MEMORY, _location),
        "setActivationLocation": TableRow("location", ONE_MEMORY, _location),
        "setOptimizerLocation": TableRow("location", "sharding of the optimizer state", _location, "optimizer"),
        "setWeightLocation": TableRow("location", ONE_MEMORY, _location),
    },
    "Options._Popart": {
        "defaultBufferingDepth": _AHEAD,
        "defaultPrefetchBufferingDepth": _AHEAD,
        "set": TableRow(None, NO_COMPILER),
        "setEngineOptions": TableRow("engine_options", f"{NO_COMPILER}; {RECORDED}", lambda name, value: dict(value)),
        "setPatterns": TableRow(lambda patterns, level=2: dict(patterns), NO_COMPILER),
        **{
            key: refused(
                f"Options._Popart.set({key!r}, ...) would change results of training and has no effect here; use "
                f"{instead}"
            )
            for key, instead in _OF_NUMBERS.items()
        },
    },
    "Options.Distributed": {
        "configureProcessId": refused(_BY_HAND),
        "disable": TableRow(lambda: True, "Options() has one process"),
        "setEnvVarNames": refused(_BY_HAND),
    },
    "TensorLocationSettings": {
        "minElementsForOffChip": TableRow("min_elements", ONE_MEMORY),
        "minElementsForReplicatedTensorSharding": TableRow(
            "min_elements",
            "size of sharded tensors",
            lambda name, value: positive("min_elements", value),
            "min_elements",
            32,
        ),
        "useIOTilesToLoad": TableRow(lambda use=True: use, NO_IPU, switch),
        "useIOTilesToStore": TableRow(lambda use=True: use, NO_IPU, switch),
        "useOnChipStorage": TableRow(lambda use=True: use, f"{ONE_MEMORY}, as useOnChipStorage(False) asks", switch),
        "useReplicatedTensorSharding": TableRow(
            lambda use=True: use, "sharding over replicas (Rajbhandari et al., ZeRO, 2020)", switch, "is_sharded", False
        ),
    },
}
"""PopTorch's options by their groups: accepted values, and the effect here or the reason for none."""
TABLE["PopdistOptions"] = {
    **TABLE["Options"],
    "replicationFactor": _decided(
        "replicationFactor", "the number of replicas of an instance; start it with another --num-replicas"
    ),
    "useIpuId": _decided("useIpuId", "the devices of an instance; leave it out"),
}
TABLE["PopdistOptions.Distributed"] = {
    "configureProcessId": _decided("Distributed.configureProcessId", "which process this is; leave it out"),
    "disable": _decided("Distributed.disable", "the number of processes; use poptorch.Options() for a single process"),
    "setEnvVarNames": _decided("Distributed.setEnvVarNames", "which process this is; leave it out"),
}

# ---- the objects


class OptionGroup(Settable):
    """A group of options by its rows of the table."""

    @property
    def _rows(self) -> Rows:
        return TABLE[self._title]


class TensorLocationSettings(OptionGroup):
    """Locations of tensors.

    Example::

        sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        options = poptorch.Options()
        options.TensorLocations.setOptimizerLocation(sharded)
    """

    def __init__(self) -> None:
        super().__init__("TensorLocationSettings")


class PopartOptions(OptionGroup):
    """Options of PopTorch's compiler, `Options._Popart`: all are accepted, and most have no effect."""

    def set(self, key: str, value: object) -> PopartOptions:
        """Accept an option by the row of its name; without a row it has no effect.

        Raises:
            StrategyError: If the option changes results of training; the message names its replacement.
        """
        return self._call(key, value) if key in self._rows else self._keep(key, value)


class DistributedOptions(OptionGroup):
    """The processes of a job, `Options.Distributed`: poprun numbers them, and `popdist.poptorch.Options` reads that."""

    _options: Options

    @property
    def numProcesses(self) -> int:
        """The number of instances."""
        return self._options.strategy.replicas.num_instances

    @property
    def processId(self) -> int:
        """The index of this instance."""
        return self._options.strategy.replicas.instance_index


class Options(OptionGroup):
    """The options of a model. Every setter returns the object, so calls can be chained; print it to see all of them.

    Semantics: PopTorch's options of the same names, whose groups are `Training`, `Precision`, `Jit`, `TensorLocations`,
    `Distributed` and `_Popart`. Options without a meaning here are accepted, with one line in the log (INFO).
    `POPTORCH_DEFAULT_OPTIONS` in the environment is a JSON object of options for `from_json`. `POPTORCH_CACHE_DIR` is a
    folder for `enableExecutableCaching`.

    Example::

        options = poptorch.Options().deviceIterations(4).replicationFactor(2).randomSeed(42)
        options.Training.gradientAccumulation(8)
    """

    output_every = 1
    _strategy: Strategy | None = None

    def __init__(self) -> None:
        super().__init__(self._title)
        distributed = DistributedOptions(f"{self._title}.Distributed")
        distributed._options = self
        groups = {
            **{name: OptionGroup(f"Options.{name}") for name in ("Training", "Precision", "Jit", "TensorLocations")},
            **{"_Popart": PopartOptions("Options._Popart"), "Distributed": distributed},
        }
        vars(self).update(groups, _groups=groups)
        if folder := os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(folder)
        if "autoReport." in os.environ.get("POPLAR_ENGINE_OPTIONS", ""):
            log_once("POPLAR_ENGINE_OPTIONS", RECORDED, logging.WARNING)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS") or "{}")

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas run models with these options; clones share it."""
        if self._strategy is None:
            self._strategy = self._new_strategy()
        return self._strategy

    def _new_strategy(self) -> Strategy:
        return LocalStrategy(self.replication_factor)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas of this process."""
        self._call("replicationFactor", replication_factor)
        self._strategy = None
        return self

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Set which outputs a call returns.

        Args:
            output_mode: Mode. The default is the last micro-batch for training, and all micro-batches for inference.
            output_return_period: n of `OutputMode.EveryN`, a divisor of the number of micro-batches of a call.

        Raises:
            ValueError: If a period is given without `EveryN`, or `EveryN` without a period.
        """
        mode = OutputMode(output_mode)
        if (mode is OutputMode.EveryN) is (output_return_period is None):
            raise ValueError(
                f"outputMode is {mode.name} with the period {output_return_period}; give a period with EveryN only"
            )
        every = positive("output_return_period", output_return_period or 1)
        said = mode.name if mode is not OutputMode.EveryN else (mode.name, every)
        return self._keep("outputMode", said, output_mode=mode, output_every=every)

    anchorMode = outputMode  # the name before PopTorch 2.3

    def defaultOutputMode(self) -> bool:
        """Return whether the output mode is the default."""
        return self.output_mode is OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = None,
    ) -> Options:
        """Record a tensor in every update, for `PoplarExecutor.getAnchoredTensor`.

        Args:
            short_name: Name for `getAnchoredTensor`.
            long_name: Name of a parameter, alone or after `Gradient___` or `UpdatedVar___`.
            output_mode: Updates of a call whose values are returned; None for the same as `outputMode`.
            output_return_period: n of `OutputMode.EveryN`, in updates.
        """
        mode = None if output_mode is None else OutputMode(output_mode)
        every = positive("output_return_period", output_return_period or 1)
        return self._keep("anchorTensor", {**self.anchors, short_name: Anchor(long_name, mode, every)})

    def randomSeed(self, random_seed: int) -> Options:
        """Set the seed of random numbers and of shuffling; 0 by default.

        As in PopTorch, this also seeds PyTorch itself, so modules made afterwards start with the same numbers.
        """
        seed = at_least(0, "randomSeed", random_seed)
        self._keep("randomSeed", seed)
        with of_program.drawing():  # a thread that reads elements seeds PyTorch for each, and restores its state
            torch.manual_seed(seed)
        return self

    def enableExecutableCaching(self, path: str | Path) -> Options:
        """Keep the programs that `torch.compile` makes in a folder; nothing else is compiled."""
        folder = str(Path(path).absolute())
        os.environ[COMPILED_BY_TORCH] = folder
        logger.info("%s keeps programs compiled by torch.compile; nothing else is compiled", folder)
        return self._keep("enableExecutableCaching", str(path))

    def from_json(self, string: str) -> Options:
        """Set the options of a JSON object such as `{"Precision.enableFloatingPointExceptions": true}`.

        A list holds several arguments. "OutputMode.All" is the member of an enumeration.

        Raises:
            ConfigFileError: If the text is not a JSON object, or a name is not an option.
        """
        try:
            for name, value in json.loads(string).items():
                group, _, method = name.rpartition(".")
                owner = self._groups.get(group) if group else self
                if owner is None or method not in owner._rows:
                    raise AttributeError(f"{name} is not an option")
                arguments = value if isinstance(value, list) else [value]
                getattr(owner, method)(*map(_enum_named, arguments))
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigFileError(
                f'{string[:200]!r} is not JSON of options: {error}; write {{"Training.gradientAccumulation": 4}}'
            ) from error
        return self

    def clone(self) -> Options:
        """Return a copy that can be changed. It shares the replicas until their number is set."""
        clone = self._copied()
        clone.Distributed._options = clone
        return clone

    __copy__ = clone

    def __deepcopy__(self, memory: object) -> Options:
        return self.clone()

    def __getstate__(self) -> Mapping[str, Any]:
        return {**vars(self), "_strategy": None}  # another process has other replicas


class PopdistOptions(Options):
    """The options of an instance under poprun: its local replicas, and all instances of the job.

    Args:
        ipus_per_replica: Number of devices of each replica, or None. It is only checked, because simulated devices are
            made as they are needed.
    """

    _title = "PopdistOptions"

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            positive("ipus_per_replica", ipus_per_replica)
        self._strategy = self._new_strategy()

    def _new_strategy(self) -> Strategy:
        """Return a strategy of all replicas of this job, also for options that were saved in another job."""
        strategy = PopDistStrategy()
        vars(self)["replication_factor"] = len(strategy.replicas.local_replicas)
        return strategy


def _enum_named(value: object) -> object:
    """Return the member of an enumeration that a text names, or the value itself."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    kind, member = value.split(".")
    found = getattr(names, kind, None)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        return value
    if member not in found.__members__:
        raise AttributeError(f"poptorch.{value} is not a member of an enumeration of poptorch")
    return found[member]
