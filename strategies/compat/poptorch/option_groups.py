"""Groups of PopTorch's options: training, precision, locations of tensors, and the compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.compat.poptorch.autocasting import Policy
from strategies.compat.poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from strategies.compat.poptorch.without_effect import (
    NO_COMPILER,
    NO_IPU,
    ONE_MEMORY,
    Accepted,
    Accepting,
    methods_of,
    tell_once,
)
from strategies.errors import StrategyError

Self = TypeVar("Self", bound="OptionGroup")

_CLOSE = 0.8
"""The similarity, from 0 to 1, from which a name counts as a misspelling of another."""


class OptionGroup(Accepting):
    """Base of options, which can be set until a model or a data loader is made with them."""

    _title = "Options"
    _groups: ClassVar[Mapping[str, type[OptionGroup]]] = {}
    """Inner groups of options, by the names of their attributes."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._is_frozen = False
        vars(self).update({name: group() for name, group in self._groups.items()})

    def _copied(self: Self) -> Self:
        """Return a copy of the options that is not frozen."""
        copied = type(self).__new__(type(self))
        groups = {name: getattr(self, name)._copied() for name in self._groups}
        vars(copied).update(vars(self), _values=dict(self._values), _is_frozen=False, **groups)
        return copied

    def _set(self: Self, name: str, value: object, **attributes: object) -> Self:
        """Keep the value given to a method, and the attributes that follow from it."""
        if self._is_frozen:
            raise StrategyError(
                f"{self._title}.{name} is set after a model or a data loader was made with these options; set it "
                "earlier, or change a copy: options.clone()"
            )
        self._values[name] = value
        vars(self).update(attributes)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to overwrite options, because nothing would check the value; accept names of the program's own."""
        if name in self._methods or callable(getattr(type(self), name, None)):
            raise AttributeError(
                f"{self._title}.{name} is a method, and assigning would overwrite it; write .{name}({value!r}) instead"
            )
        if name in self._groups or (hasattr(type(self), name) and not name.startswith("_")):
            raise AttributeError(
                f"{self._title}.{name} follows from the options and cannot be assigned; set options by methods, such "
                "as options.deviceIterations(4)"
            )
        if meant := self._meant(name):
            raise AttributeError(
                f"{self._title}.{name} is not an option; did you mean {meant}(...)? Set options by methods, such as "
                "options.deviceIterations(4)"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the table, or refuse an unknown name with the most similar one."""
        if name in self._methods:
            return super().__getattr__(name)
        known = [each for each in (*dir(type(self)), *self._methods, *self._groups) if not each.startswith("_")]
        meant = next(iter(get_close_matches(name, known, 1, _CLOSE)), None) or self._meant(name)
        way_out = f"did you mean {meant}?" if meant else "the documentation (docs: torch) lists the options"
        raise AttributeError(f"{self._title}.{name} is not an option; {way_out}")

    def _meant(self, name: str) -> str | None:
        """Return the option with the most similar name, in this group or an inner one, or None."""
        if name.startswith("_"):
            return None
        known = {option.split(".")[-1].lower(): option for option in self._options_known()}
        close = get_close_matches(name.lower().replace("_", ""), known, 1, _CLOSE)
        return known[close[0]] if close else None

    @classmethod
    def _options_known(cls) -> Iterator[str]:
        """Yield the names of all options, with a dot for options of inner groups."""
        for name in dir(cls):
            if not name.startswith("_") and callable(getattr(cls, name)):
                yield name
        yield from cls._methods
        for name, group in cls._groups.items():
            if not name.startswith("_"):
                yield from (f"{name}.{option}" for option in group._options_known() if option != "toDict")

    def _accept(self: Self, name: str, value: object, why: str) -> Self:
        tell_once(f"{self._title}.{name}", why)
        return self._set(name, value)

    def _set_switch(self: Self, name: str, value: bool, **attributes: object) -> Self:
        require_switches(**{name: value})
        return self._set(name, value, **attributes)

    def _freeze(self) -> None:
        for name in self._groups:
            getattr(self, name)._freeze()
        self._is_frozen = True

    def toDict(self) -> Mapping[str, object]:
        """Return the options that have been set, by name, with a dictionary for each group."""
        groups = {name: getattr(self, name).toDict() for name in self._groups}
        return {**self._values, **{name: inner for name, inner in groups.items() if inner}}

    def __repr__(self) -> str:
        return f"{self._title}({', '.join(f'{name}={value!r}' for name, value in self.toDict().items())})"


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
BUFFERING = ("defaultPrefetchBufferingDepth", "defaultBufferingDepth")


class TrainingOptions(OptionGroup):
    """Options of training, `Options.Training`.

    Example::

        options = poptorch.Options()
        options.Training.gradientAccumulation(8).setAutomaticLossScaling(True)
    """

    _title = "Options.Training"
    _methods = methods_of(
        _title,
        setConvolutionDithering=Accepted(lambda enabled: enabled, "convolutions are not spread over tiles", True),
    )

    gradient_accumulation = 1
    reduction = ReductionType.Mean
    mean_strategy = MeanReductionStrategy.Post
    automatic_loss_scaling = False

    def gradientAccumulation(self, gradient_accumulation: int) -> TrainingOptions:
        """Set the number of micro-batches that each replica accumulates for one update."""
        count = positive("gradientAccumulation", gradient_accumulation)
        return self._set("gradientAccumulation", count, gradient_accumulation=count)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> TrainingOptions:
        """Set whether gradients are reduced to their mean or their sum, over micro-batches and replicas.

        Raises:
            ValueError: For another reduction.
        """
        if reduction_type not in (ReductionType.Sum, ReductionType.Mean):
            raise ValueError(f"the reduction of gradients is {reduction_type!r}; use ReductionType.Sum or .Mean")
        kind = ReductionType(reduction_type)
        return self._set("accumulationAndReplicationReductionType", kind, reduction=kind)

    accumulationReductionType = accumulationAndReplicationReductionType  # the name before PopTorch 2.3

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> TrainingOptions:
        """Set how to compute a mean over micro-batches: Running, or Post, which divides each loss by their number.

        A running mean rescales the gradients before each micro-batch, so blocks run in sequence, not in a pipeline.
        """
        kind = MeanReductionStrategy(mean_reduction_strategy)
        return self._set("setMeanAccumulationAndReplicationReductionStrategy", kind, mean_strategy=kind)

    def setAutomaticLossScaling(self, enabled: bool) -> TrainingOptions:
        """Scale losses dynamically, as `LossScaling` does; the first scale is the optimizer's `loss_scaling`."""
        return self._set_switch("setAutomaticLossScaling", enabled, automatic_loss_scaling=enabled)


class PrecisionOptions(OptionGroup):
    """Options of precision, `Options.Precision`.

    Example::

        options = poptorch.Options()
        options.Precision.enableFloatingPointExceptions(True)
    """

    _title = "Options.Precision"
    _methods = methods_of(
        _title,
        enableStochasticRounding=Accepted(lambda enabled: enabled, "PyTorch rounds to nearest, in float32", True),
        runningStatisticsAlwaysFloat=Accepted(lambda value: value, "buffers keep their dtypes", True),
        setPartialsType=Accepted(lambda dtype: dtype, "PyTorch chooses the dtype of partial sums"),
    )

    autocasts = True
    checks_numerics = False

    def autocastEnabled(self, autocast_enabled: bool) -> PrecisionOptions:
        """Set whether `poptorch.autocast` has an effect in models."""
        return self._set_switch("autocastEnabled", autocast_enabled, autocasts=autocast_enabled)

    def autocastPolicy(self, autocast_policy: Policy | None) -> PrecisionOptions:
        """Accept a policy without lists: `poptorch.autocast` casts the operators of PyTorch's own list.

        Raises:
            StrategyError: If the policy has lists of its own.
            TypeError: If it is not a Policy.
        """
        if autocast_policy is not None and not isinstance(autocast_policy, Policy):
            raise TypeError(f"the policy is {autocast_policy!r}; give poptorch.autocasting.Policy(), or None")
        if autocast_policy is not None and autocast_policy.lists:
            raise StrategyError(
                f"the policy lists operators ({', '.join(autocast_policy.lists)}), but torch.autocast has its own list "
                "for CPUs; leave the policy out, and cast in the model"
            )
        return self._set("autocastPolicy", autocast_policy)

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> PrecisionOptions:
        """Accept `HalfUpcastToFloat`, which is PyTorch's promotion of dtypes.

        Raises:
            StrategyError: For FloatDowncastToHalf.
        """
        if half_float_casting is HalfFloatCastingBehavior.FloatDowncastToHalf:
            raise StrategyError(
                "PyTorch promotes float16 and float32 to float32, but FloatDowncastToHalf would do the opposite; "
                "cast in the model, or use HalfUpcastToFloat"
            )
        return self._accept("halfFloatCasting", half_float_casting, "PyTorch promotes float16 to float32")

    def enableFloatingPointExceptions(self, enabled: bool) -> PrecisionOptions:
        """Raise `NonFiniteGradientError` if a gradient is not finite."""
        return self._set_switch("enableFloatingPointExceptions", enabled, checks_numerics=enabled)

    @property
    def rounds_stochastically(self) -> bool:
        """Whether an IPU would round stochastically."""
        return bool(self._values.get("enableStochasticRounding"))


class TensorLocationSettings(OptionGroup):
    """Locations of tensors.

    Example::

        sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        options = poptorch.Options()
        options.TensorLocations.setOptimizerLocation(sharded)
    """

    _title = "TensorLocationSettings"
    _methods = methods_of(
        _title,
        minElementsForOffChip=Accepted(lambda min_elements: min_elements, ONE_MEMORY),
        useIOTilesToLoad=Accepted(lambda use=True: use, NO_IPU, True),
        useIOTilesToStore=Accepted(lambda use=True: use, NO_IPU, True),
        useOnChipStorage=Accepted(lambda use=True: use, f"{ONE_MEMORY}, as useOnChipStorage(False) asks", True),
    )

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Set whether each replica keeps only a part of the optimizer state (Rajbhandari et al., ZeRO, 2020)."""
        return self._set_switch("useReplicatedTensorSharding", use)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Set the number of elements below which tensors are not sharded."""
        return self._set("minElementsForReplicatedTensorSharding", positive("min_elements", min_elements))


def settings_of(location: object) -> TensorLocationSettings:
    """Return a location after a check of its class.

    Raises:
        TypeError: If it is not a TensorLocationSettings.
    """
    if not isinstance(location, TensorLocationSettings):
        raise TypeError(
            f"the location is {location!r}; give poptorch.TensorLocationSettings(), for example with "
            ".useReplicatedTensorSharding()"
        )
    return location


class TensorLocationOptions(OptionGroup):
    """Options of the locations of tensors, `Options.TensorLocations`."""

    _title = "Options.TensorLocations"
    _methods = methods_of(
        _title,
        numIOTiles=Accepted(lambda num_tiles: num_tiles, NO_IPU),
        setAccumulatorLocation=Accepted(lambda location: settings_of(location), ONE_MEMORY),
        setActivationLocation=Accepted(lambda location: settings_of(location), ONE_MEMORY),
        setWeightLocation=Accepted(lambda location: settings_of(location), ONE_MEMORY),
    )

    def setOptimizerLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set whether optimizer state is sharded, by `useReplicatedTensorSharding`; results stay the same."""
        return self._set("setOptimizerLocation", settings_of(location))

    @property
    def of_optimizer(self) -> Mapping[str, object]:
        """The settings of the location of optimizer state."""
        location = self._values.get("setOptimizerLocation")
        return location.toDict() if isinstance(location, TensorLocationSettings) else {}

    @property
    def shards_optimizer(self) -> bool:
        """Whether every replica keeps only a part of the optimizer state."""
        return bool(self.of_optimizer.get("useReplicatedTensorSharding"))


class JitOptions(OptionGroup):
    """Options of PopTorch's reading of a model, `Options.Jit`."""

    _title = "Options.Jit"
    _methods = methods_of(
        _title,
        traceModel=Accepted(lambda trace_model: trace_model, "no model is traced: its forward runs as written", True),
    )


class PopartOptions(OptionGroup):
    """Options of PopTorch's compiler, `Options._Popart`: all are accepted, and most have no effect."""

    _title = "Options._Popart"
    _methods = methods_of(_title, setPatterns=Accepted(lambda patterns, level=2: dict(patterns), NO_COMPILER))

    buffers: int | None = None
    engine_options: Mapping[str, str] = MappingProxyType({})

    def set(self, key: str, value: object) -> PopartOptions:
        """Accept an option; the options of `BUFFERING` set the number of batches that a `DataLoader` makes ahead.

        Raises:
            StrategyError: If the option changes results of training; the message names its replacement.
        """
        if key in _OF_NUMBERS:
            raise StrategyError(
                f"{self._title}.set({key!r}, ...) would change results of training and has no effect here; use "
                f"{_OF_NUMBERS[key]}"
            )
        if key in BUFFERING:
            return self._set(key, value, buffers=positive(key, value))
        return self._accept(key, value, NO_COMPILER)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> PopartOptions:
        """Accept options of the engine; only `autoReport.*` has an effect, as `Options.enableProfiling` describes."""
        given = dict(engine_options)
        if any(name.startswith("autoReport.") for name in given):
            return self._set("setEngineOptions", given, engine_options=MappingProxyType(given))
        return self._accept("setEngineOptions", given, NO_COMPILER)
