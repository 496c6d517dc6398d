"""PopTorch's options."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import popdist
from strategies.argument_checks import at_least, positive
from strategies.compat.poptorch.blocks import ExecutionStrategy
from strategies.compat.poptorch.enums import CommGroupType, OutputMode
from strategies.compat.poptorch.errors import ConfigFileError
from strategies.compat.poptorch.option_groups import (
    JitOptions,
    OptionGroup,
    PopartOptions,
    PrecisionOptions,
    TensorLocationOptions,
    TrainingOptions,
)
from strategies.compat.poptorch.options_file import set_from_line, set_from_value
from strategies.compat.poptorch.outputs import Anchor
from strategies.compat.poptorch.profiling import folder_wanted, record_job, recording_into, tell_too_late
from strategies.compat.poptorch.without_effect import NO_COMPILER, NO_IPU, Accepted, Refused, methods_of
from strategies.errors import FailedPreconditionError, StrategyError
from strategies.ipu import IPUStrategy
from strategies.job_strategies import PopDistStrategy
from strategies.strategy import Strategy

COMPILED_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's variable for the folder of what it compiles."""

logger = logging.getLogger("strategies.torch.poptorch")


_BY_HAND = "processes are not numbered by hand; start them with poprun, and use popdist.poptorch.Options()"


def _decided(call: str, what: str) -> Refused:
    words = f"Cannot call `{call}` with popdist.poptorch.Options: poprun has decided {what}"
    return Refused(words, FailedPreconditionError)


class DistributedOptions(OptionGroup):
    """Several processes, `Options.Distributed`: poprun knows them, and `popdist.poptorch.Options` asks it."""

    _title = "Options.Distributed"
    _methods = methods_of(
        _title,
        configureProcessId=Refused(_BY_HAND),
        disable=Accepted(lambda: True, "Options() has one process"),
        setEnvVarNames=Refused(_BY_HAND),
    )

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    @property
    def numProcesses(self) -> int:
        """The number of instances."""
        return self._options.strategy.replicas.num_instances

    @property
    def processId(self) -> int:
        """The index of this instance."""
        return self._options.strategy.replicas.instance_index


class DecidedDistributedOptions(DistributedOptions):
    """The processes of `popdist.poptorch.Options`, of which poprun has decided all.

    Every method raises FailedPreconditionError, which is a RuntimeError, as the original's.
    """

    _methods = {
        "configureProcessId": _decided("Distributed.configureProcessId", "which process this is; leave it out"),
        "disable": _decided(
            "Distributed.disable", "how many processes there are; use poptorch.Options() for one alone"
        ),
        "setEnvVarNames": _decided("Distributed.setEnvVarNames", "which process this is; leave it out"),
    }


class Options(OptionGroup):
    """The options of a model. Every setter returns them, so calls can be chained; print them to see what is set.

    Semantics: PopTorch's options of the same names. What has no meaning without an IPU is taken, and one line of the
    log (INFO) says so once. `POPTORCH_DEFAULT_OPTIONS` in the environment is JSON of options, see `from_json`;
    `POPTORCH_CACHE_DIR` is the folder of `enableExecutableCaching`.
    """

    _methods = methods_of(
        "Options",
        appendToLocationExcludes=Accepted(lambda *excludes: excludes, NO_COMPILER),
        autoRoundNumIPUs=Accepted(lambda auto_round_num_ipus=True: auto_round_num_ipus, NO_IPU, True),
        broadcastBuffers=Accepted(
            lambda broadcast_buffers=True: broadcast_buffers, "all instances agree on buffers after each update", True
        ),
        connectionType=Accepted(lambda connection_type: connection_type, NO_IPU),
        disableModuleNamescope=Accepted(lambda: True, NO_COMPILER),
        enableStableNorm=Accepted(lambda enabled: enabled, "PyTorch's normalisations are computed in two passes", True),
        enableSyntheticData=Accepted(lambda enabled: enabled, "data are not copied to a device", True),
        logCycleCount=Accepted(lambda log_cycle_count: log_cycle_count, NO_IPU, True),
        logDir=Accepted(lambda log_dir: log_dir, NO_COMPILER),
        maxRepeatLogs=Accepted(lambda max_lines: max_lines, "the log repeats no line"),
        modelName=Accepted(lambda name: name, NO_COMPILER),
        relaxOptimizerAttributesChecks=Accepted(lambda relax=True: relax, "all numbers of optimizers may change", True),
        setAvailableMemoryProportion=Accepted(
            lambda available_memory_proportion: dict(available_memory_proportion), NO_IPU
        ),
        showCompilationProgressBar=Accepted(lambda show=True: show, NO_COMPILER, True),
        sourceLocationExcludes=Accepted(lambda excludes: list(excludes), NO_COMPILER),
        syncPattern=Accepted(lambda sync_pattern: sync_pattern, NO_IPU),
        updatableNamedBuffers=Accepted(lambda buffers: list(buffers), "buffers of the module are read at every call"),
        useIpuId=Accepted(lambda ipu_id: ipu_id, NO_IPU),
        useIpuModel=Accepted(lambda use_model: use_model, NO_IPU, True),
        useOfflineIpuTarget=Accepted(lambda ipu_version=2: ipu_version, NO_IPU),
    )

    device_iterations = 1
    replication_factor = 1
    output_mode = OutputMode.Default
    output_every = 1
    seed = 0
    execution_strategy: ExecutionStrategy | None = None
    anchors: Mapping[str, Anchor] = MappingProxyType({})

    Training: TrainingOptions
    Precision: PrecisionOptions
    Jit: JitOptions
    TensorLocations: TensorLocationOptions
    _Popart: PopartOptions
    _groups = {
        "Training": TrainingOptions,
        "Precision": PrecisionOptions,
        "Jit": JitOptions,
        "TensorLocations": TensorLocationOptions,
        "_Popart": PopartOptions,
    }
    _distributed_kind = DistributedOptions

    def __init__(self) -> None:
        super().__init__()
        self._strategy: Strategy | None = None
        if folder := os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(folder)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS") or "{}")

    @cached_property
    def Distributed(self) -> DistributedOptions:
        """The processes."""
        return self._distributed_kind(self)

    @property
    def strategy(self) -> Strategy:
        """The replicas on which models with these options run; clones have the same."""
        if self._strategy is None:
            self._strategy = self._new_strategy()
        return self._strategy

    def _new_strategy(self) -> Strategy:
        folder = folder_wanted(os.environ, self._Popart.engine_options)
        attached = () if folder is None else recording_into(folder, self.replication_factor)
        return IPUStrategy(self.replication_factor, attached=attached)

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set how many updates, or batches of an inference, a call makes."""
        count = positive("deviceIterations", device_iterations)
        return self._set("deviceIterations", count, device_iterations=count)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas in this process."""
        count = positive("replicationFactor", replication_factor)
        return self._set("replicationFactor", count, replication_factor=count, _strategy=None)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Set the outputs that a call returns.

        Args:
            output_mode: see there; the default is the last one for training, and all for inference.
            output_return_period: n of `OutputMode.EveryN`, a divisor of the micro-batches of a call.

        Raises:
            ValueError: if there is a period without `EveryN`, or none with it.
        """
        mode = OutputMode(output_mode)
        if (mode is OutputMode.EveryN) is (output_return_period is None):
            raise ValueError(
                f"outputMode is {mode.name} with the period {output_return_period}; EveryN, and it alone, has one"
            )
        every = positive("output_return_period", output_return_period or 1)
        said = mode.name if mode is not OutputMode.EveryN else (mode.name, every)
        return self._set("outputMode", said, output_mode=mode, output_every=every)

    anchorMode = outputMode  # its name before PopTorch 2.3

    def defaultOutputMode(self) -> bool:
        """Whether it is the default one."""
        return self.output_mode is OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = None,
    ) -> Options:
        """Look at a tensor in every update; see `PoplarExecutor.getAnchoredTensor`.

        Args:
            short_name: by which it is asked for.
            long_name: a parameter's name, `Gradient___` and one, or `UpdatedVar___` and one.
            output_mode: of which updates of a call it is returned; None: of those whose outputs are, see `outputMode`.
            output_return_period: n of `OutputMode.EveryN`, in updates.
        """
        mode = None if output_mode is None else OutputMode(output_mode)
        every = positive("output_return_period", output_return_period or 1)
        anchors = {**self.anchors, short_name: Anchor(long_name, mode, every)}
        return self._set(f"anchorTensor({short_name!r})", long_name, anchors=anchors)

    def randomSeed(self, random_seed: int) -> Options:
        """Set the seed of random numbers and of shuffling; 0 unless it is set.

        It is PyTorch's from here on, too, as in PopTorch: modules that are made afterwards begin with the same numbers.
        """
        seed = at_least(0, "randomSeed", random_seed)
        self._set("randomSeed", seed, seed=seed)
        torch.manual_seed(seed)
        return self

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Options:
        """Set how blocks become stages, and how stages run."""
        if not isinstance(strategy, ExecutionStrategy):
            raise TypeError(f"{strategy!r} is no strategy of execution; use poptorch.PipelinedExecution(...)")
        return self._set("setExecutionStrategy", strategy, execution_strategy=strategy)

    def loadFromFile(self, filepath: str | Path) -> Options:
        """Set what the lines of a file say, each as in a program, without "options.": `deviceIterations(4)`.

        Nothing is executed: values are literals, members of PopTorch's enumerations, dtypes, stages and strategies.

        Raises:
            ConfigFileError: if a line is none; it is named.
        """
        for number, line in enumerate(Path(filepath).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                set_from_line(self, line.strip())
            except (SyntaxError, NameError, AttributeError, TypeError, ValueError, RecursionError) as error:
                said = getattr(error, "msg", error)
                raise ConfigFileError(
                    f"line {number} of {filepath} is {line.strip()!r}: {said}; write it as in a program, without "
                    "'options.': deviceIterations(4)"
                ) from error
        return self

    def from_json(self, string: str) -> Options:
        """Set what an object of JSON says: `{"Precision.enableFloatingPointExceptions": true}`.

        Raises:
            ConfigFileError: if it is no object, or a name no option.
        """
        try:
            for name, value in json.loads(string).items():
                set_from_value(self, name, value)
        except (ValueError, AttributeError, NameError, TypeError, RecursionError) as error:
            raise ConfigFileError(
                f'{string[:200]!r} is no JSON of options: {error}; write {{"Training.gradientAccumulation": 4}}'
            ) from error
        return self

    def clone(self) -> Options:
        """Return a copy that can be changed, on the same replicas unless it is given others."""
        clone = self._copied()
        vars(clone).pop("Distributed", None)  # a clone makes its own, as its replicas may become others
        return clone

    __copy__ = clone

    def __deepcopy__(self, memory: object) -> Options:
        return self.clone()

    @classmethod
    def _options_known(cls) -> Iterator[str]:
        yield from super()._options_known()
        yield from (f"Distributed.{name}" for name in cls._distributed_kind._methods)

    def __repr__(self) -> str:
        return super().__repr__().replace(self._title, type(self).__name__, 1)

    def __getstate__(self) -> Mapping[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "Distributed"}  # it has the strategy
        return {**kept, "_strategy": None}

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Options:
        """Accept that each replica has rows of its own; refuse groups of replicas with the same rows.

        Raises:
            StrategyError: for groups of several replicas.
            ValueError: for one group of all replicas, as in PopTorch.
        """
        if CommGroupType(input_group_type) is CommGroupType.All:
            raise ValueError("replicas that all get the same rows compute the same; use CommGroupType.NoGrouping")
        if CommGroupType(input_group_type) is not CommGroupType.NoGrouping and input_group_size != 1:
            raise StrategyError(
                f"groups of {input_group_size} replicas are to get the same rows, and every replica has rows of its "
                "own here; repeat the rows in the data set, or use CommGroupType.NoGrouping"
            )
        return self._accept("inputReplicaGrouping", input_group_size, "every replica has rows of its own")

    def enableExecutableCaching(self, path: str | Path) -> Options:
        """Keep what `torch.compile` makes there; nothing else is compiled."""
        folder = str(Path(path).absolute())
        os.environ[COMPILED_BY_TORCH] = folder
        logger.info("%s has what torch.compile makes; nothing else is compiled", folder)
        return self._set("enableExecutableCaching", str(path))

    def enableProfiling(self, profile_dir: str | Path | None = None) -> Options:
        """Record each step into a folder, and say how that is opened; `POPLAR_ENGINE_OPTIONS` has precedence.

        Args:
            profile_dir: the folder; None: this one.
        """
        folder = str(profile_dir or ".")
        self._Popart.setEngineOptions({**self._Popart.engine_options, "autoReport.directory": folder})
        return self._set("enableProfiling", folder, _strategy=self._recorded())

    def _recorded(self) -> Strategy | None:
        """Return the strategy that profiling needs; None: it is made when it is asked for."""
        return None


class PopdistOptions(Options):
    """The options of an instance under poprun: its replicas, and all instances of the job.

    Args:
        ipus_per_replica: devices that each replica spans; None: what poprun was told. More than poprun was told need
            not be said: simulated devices are there as they are needed.
    """

    _distributed_kind = DecidedDistributedOptions
    _methods = {
        **Options._methods,
        "useIpuId": _decided("useIpuId", "on which devices an instance runs; leave it out"),
    }

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            positive("ipus_per_replica", ipus_per_replica)
        self._strategy = self._new_strategy()

    def _new_strategy(self) -> Strategy:
        """Return a strategy of all replicas of the job, also for options that were saved in another one."""
        folder = folder_wanted(os.environ, self._Popart.engine_options)
        if folder is not None and not popdist.isBackendInitialized():
            record_job(folder)
        strategy = PopDistStrategy()
        vars(self)["replication_factor"] = len(strategy.replicas.local_replicas)
        return strategy

    def _recorded(self) -> Strategy:
        tell_too_late()
        return self.strategy

    def replicationFactor(self, replication_factor: int) -> Options:
        """Refused.

        Raises:
            FailedPreconditionError: always: poprun decides.
        """
        what = "how many replicas an instance has; start it with another --num-replicas"
        _decided("replicationFactor", what).called("replicationFactor")
