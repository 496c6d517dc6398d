"""The options of a training step, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypedDict

import jax
from jax.typing import DTypeLike

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import at_least, positive
from strategies.defaults import Defaults
from strategies.exchange.transfer import GradientTransfer
from strategies.gradients.accumulation import GradientAccumulationReductionMethod
from strategies.gradients.arguments import Filter
from strategies.gradients.computation import ReplicaPlan
from strategies.gradients.model_state import ModelStateRule, check_aggregation, has_own
from strategies.gradients.replica_program import Accumulation, Precision, ReplicaProgram, ReplicaShapes, float_dtype
from strategies.loss_scaling import LossScaling
from strategies.programs.recomputation import Policy
from strategies.replicas.replicas import Replicas
from strategies.replicas.shards import Shards
from strategies.typing import AccumulationDtype, MapGradient, Tree
from strategies.updates.update import UpdateSettings


class TrainerOptions(TypedDict, total=False):
    """The options that `Trainer` takes by name; see `StepOptions`."""

    gradient_accumulation_count: int
    gradient_accumulation_dtype: AccumulationDtype
    reduction_method: GradientAccumulationReductionMethod | str
    map_gradient: MapGradient | None
    replicated_optimizer_state_sharding: bool | None
    min_elements_for_sharding: int
    offload_optimizer_state: bool | None
    compute_dtype: DTypeLike | None
    loss_scaling: LossScaling | float | str | None
    gradient_transfer_dtype: DTypeLike | None
    stochastic_rounding: bool
    recompute: str | Policy
    model_state_aggregation: Tree
    trainable: Filter
    pipeline: PipelinePlanner | None


class PipelinePlanner(Protocol):
    """The interface of options that cut a replica into stages; `strategies.Pipelining` has it."""

    @property
    def terms(self) -> Mapping[str, object]:
        """The options that have to be alike on all instances."""

    def plan(
        self, replicas: Replicas, program: ReplicaProgram, shapes: ReplicaShapes, shards: Shards | None
    ) -> ReplicaPlan:
        """Return the programs of the stages.

        Args:
            replicas: where they are.
            program: of a replica.
            shapes: of what a replica takes.
            shards: how means of gradients are cut; None for whole ones.

        Raises:
            ValueError: if the program cannot be cut like that.
        """


@dataclass(frozen=True)
class StepOptions:
    """The options of a training step.

    Attributes:
        seed: of the keys.
        check_numerics: raise `NonFiniteGradientError` for the first gradient that is NaN or infinite.
        digest_every: compare the bits of variables and optimizer state between instances before every so many steps,
            and raise `DivergenceError` where they differ; under `poprun --on-failure shrink` an instance that differs
            from most gets theirs instead. 0: never. What instances have parts of is not compared: sharded optimizer
            state, and residuals.
        gradient_accumulation_count: micro-batches of each replica for one update. A replica's rows of the batch are
            its micro-batches one after another (`distribute_dataset(gradient_accumulation_count=...)`), and instances
            exchange gradients once per update.
        gradient_accumulation_dtype: of the accumulators, and of the gradients that the optimizer gets: None for the
            variable's, a dtype, or a function of the variable.
        reduction_method: how micro-batches are reduced: SUM, MEAN or RUNNING_MEAN, see
            `GradientAccumulationReductionMethod`. Over replicas gradients are always averaged.
        map_gradient: None, or a function `(gradient, variable) -> gradient` of each variable that is trained: of each
            micro-batch on each replica, before anything is added up. Without the loss scale. In a pipeline not with
            `loss_scaling`, nor with a variable that several stages use.
        replicated_optimizer_state_sharding: every replica keeps 1/R of the optimizer state and updates that, and the
            new variables are gathered; the same bits. The state of an optimizer that does not compute element by
            element is in parts between updates only, and put together for each of them. None: as
            `offload_optimizer_state`.
        min_elements_for_sharding: the state of smaller variables stays whole.
        offload_optimizer_state: keep optimizer state in host memory between updates (JAX's memory kind
            `pinned_host`). None: as the runtime likes, which is False.
        compute_dtype: bfloat16 or float16: variables and batches are cast to it for `loss_fn`; gradients, updates and
            the variables themselves keep their dtype.
        loss_scaling: None, "dynamic", a number for a scale that stays, or a `LossScaling`. A step with a gradient
            that is not finite on any replica changes nothing on all of them but the scale; the metrics get
            "loss_scale" and "skipped_steps".
        gradient_transfer_dtype: float16 or bfloat16: gradients travel in it, half as many bytes as float32, and are
            added in the order of the tree in float32. int8: a quarter, with error feedback; see
            `strategies.exchange.transfer`.
        stochastic_rounding: of the sum of a 16-bit variable and its change.
        recompute: what of the forward pass is computed again for the backward pass: "none", "blocks" (what lies
            between `recomputation_checkpoint`s) or a policy of `jax.checkpoint_policies`.
        model_state_aggregation: how replicas agree on the model state after each step, as a word for all of it, or a
            pytree of words that begins as the model state does: "mean", over all replicas in their order; "first",
            what replica 0 has; "per_replica", to each replica its own, which is lost with an instance; "sum": replicas
            begin at zero, and what all of them have then is added to what there was; "alike": every replica makes the
            same of it, so nothing has to travel; "constant": it stays. None: the mean of floating-point leaves, and
            replica 0's for others. Not with gradients as int8.
        trainable: which variables are trained: a function `(name, variable) -> bool` of names such as
            `['dense']['kernel']`, or a pytree of bools that begins as the variables do; None for all. The others keep
            their bits, may be of any dtype, and have no gradients and no optimizer state, which is that of a tree with
            None in their places.
        pipeline: None, or how a replica is cut into stages that run on several devices. Not with `recompute`, in whose
            place a pipeline has its own, nor with gradients as int8.

    Raises:
        TypeError: if a switch is neither True nor False.
        ValueError: if an option is out of range, or two of them exclude each other.
    """

    seed: int = 0
    check_numerics: bool = False
    digest_every: int = 0
    gradient_accumulation_count: int = 1
    gradient_accumulation_dtype: AccumulationDtype = None
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.MEAN
    map_gradient: MapGradient | None = None
    replicated_optimizer_state_sharding: bool | None = False
    min_elements_for_sharding: int = 32
    offload_optimizer_state: bool | None = None
    compute_dtype: DTypeLike | None = None
    loss_scaling: LossScaling | float | str | None = None
    gradient_transfer_dtype: DTypeLike | None = None
    stochastic_rounding: bool = False
    recompute: str | Policy = "none"
    model_state_aggregation: Tree = None
    trainable: Filter = None
    pipeline: PipelinePlanner | None = None

    def __post_init__(self) -> None:
        self._require_switches()
        at_least(0, "digest_every", self.digest_every)
        if self.check_numerics and self.scaling is not None:
            raise ValueError("check_numerics raises for the gradients that loss_scaling expects; use one of them")
        positive("min_elements_for_sharding", self.min_elements_for_sharding)
        if self.replicated_optimizer_state_sharding and self.offload_optimizer_state is False:
            raise ValueError(
                "replicated_optimizer_state_sharding=True with offload_optimizer_state=False: the optimizer state must "
                "be offloaded to be sharded, as in the original; leave offload_optimizer_state out or make it True"
            )
        check_aggregation(self.model_state_aggregation)
        if self.map_gradient is not None and not callable(self.map_gradient):
            raise TypeError(
                f"map_gradient is {self.map_gradient!r}, a {type(self.map_gradient).__name__}; use a function "
                "(gradient, variable) -> gradient"
            )
        _ = self.accumulation, self.precision, self.transfer  # each refuses what is out of range
        if self.pipeline is not None:
            self._refuse_with_pipeline()

    def _require_switches(self) -> None:
        require_switches(
            check_numerics=self.check_numerics,
            stochastic_rounding=self.stochastic_rounding,
        )
        require_switches_or_none(
            replicated_optimizer_state_sharding=self.replicated_optimizer_state_sharding,
            offload_optimizer_state=self.offload_optimizer_state,
        )

    def _refuse_with_pipeline(self) -> None:
        if self.map_gradient is not None and self.scaling is not None:
            raise ValueError(
                "map_gradient would get gradients that loss_scaling has multiplied, in a pipeline; use one of them"
            )
        if self.recompute != "none":
            raise ValueError(
                f"recompute is {_named(self.recompute)!r}, and there is a pipeline, whose stages recompute by "
                "themselves; leave recompute out, and use Pipelining(recompute=True)"
            )
        if self.transfer.is_quantised:
            raise ValueError(
                "gradient_transfer_dtype is int8, whose blocks go through all gradients, and with a pipeline gradients "
                "leave stage by stage; use float16 or bfloat16"
            )

    @cached_property
    def scaling(self) -> LossScaling | None:
        """The scaling of losses; None if they are not scaled."""
        return LossScaling.parse(self.loss_scaling)

    @cached_property
    def accumulation(self) -> Accumulation:
        """The options with which micro-batches become one gradient."""
        return Accumulation(
            positive("gradient_accumulation_count", self.gradient_accumulation_count),
            GradientAccumulationReductionMethod.parse(self.reduction_method),
            self.gradient_accumulation_dtype,
            self.map_gradient,
        )

    @cached_property
    def precision(self) -> Precision:
        """In which dtypes replicas compute."""
        return Precision(float_dtype("compute_dtype", self.compute_dtype), self.scaling is not None)

    @cached_property
    def transfer(self) -> GradientTransfer:
        """In which dtype gradients travel."""
        return GradientTransfer.parse(self.gradient_transfer_dtype)

    def rule_of(self, model_state: Tree) -> ModelStateRule:
        """Return the rule by which replicas agree on such a model state.

        Raises:
            ValueError: see `ModelStateRule.of`; or gradients travel as int8.
        """
        if model_state is not None and self.transfer.is_quantised:
            raise ValueError(
                "gradient_transfer_dtype is int8, and there is a model state, whose means do not travel with int8 "
                "gradients; use float16 or bfloat16"
            )
        return ModelStateRule.of(model_state, self.model_state_aggregation if model_state is not None else None)

    def shapes_of_replica(self, model_state: Tree) -> Tree:
        """Return the shapes and dtypes of what one replica has of a model state."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model_state)
        return self.rule_of(shapes).map_own(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)

    @property
    def shards_state(self) -> bool:
        """Whether every replica keeps a part of the optimizer state."""
        shards = self.replicated_optimizer_state_sharding
        return bool(self.offload_optimizer_state if shards is None else shards)

    @property
    def of_update(self) -> UpdateSettings:
        """The options that change how variables are updated."""
        return UpdateSettings(
            seed=self.seed,
            gradient_dtype=self.gradient_accumulation_dtype,
            unscales=self.scaling is not None and not self.transfer.is_quantised,
            rounds_stochastically=self.stochastic_rounding,
            offloads_state=bool(self.offload_optimizer_state),
            shards_state=self.shards_state,
            min_elements=self.min_elements_for_sharding,
        )

    @property
    def own_part(self) -> str | None:
        """The part of the state that differs between instances, in words; None if all have the same state."""
        kinds = {
            "sharded optimizer state": self.shards_state,
            "residuals of int8 gradients": self.transfer.is_quantised,
            "model state of single replicas": has_own(self.model_state_aggregation),
        }
        return next((kind for kind, has_it in kinds.items() if has_it), None)

    @property
    def may_fuse(self) -> bool:
        """Whether several steps may be one program."""
        is_plain = self.scaling is None and self.pipeline is None
        return is_plain and not self.transfer.is_quantised and not self.check_numerics

    @property
    def terms(self) -> Mapping[str, object]:
        """The options as all instances have to have them."""
        return {
            "seed": self.seed,
            "check_numerics": self.check_numerics,
            "digest_every": self.digest_every,
            "gradient_accumulation_count": self.gradient_accumulation_count,
            "gradient_accumulation_dtype": _named(self.gradient_accumulation_dtype),
            "reduction_method": self.accumulation.method.name,
            "map_gradient": _named(self.map_gradient),
            "replicated_optimizer_state_sharding": self.shards_state,
            "min_elements_for_sharding": self.min_elements_for_sharding,
            "offload_optimizer_state": self.of_update.offloads_state,
            "compute_dtype": self.precision.compute,
            "loss_scaling": self.scaling,
            "gradient_transfer_dtype": self.transfer.dtype,
            "stochastic_rounding": self.stochastic_rounding,
            "recompute": _named(self.recompute),
            "model_state_aggregation": self.model_state_aggregation,
            "trainable": _named(self.trainable),
            "pipeline": None if self.pipeline is None else dict(self.pipeline.terms),
        }


def configured(
    seed: int, check_numerics: bool | None, digest_every: int, options: TrainerOptions, defaults: Defaults
) -> StepOptions:
    """Return the options of a step; those that are left out are as the defaults of the strategy say.

    Args:
        seed: see `StepOptions`.
        check_numerics: see there; None where it is left out. It stays off where losses are scaled, whose gradients are
            expected to overflow.
        digest_every: see there.
        options: the others, as far as they are given.
        defaults: of the strategy.

    Raises:
        ValueError: see `StepOptions`.
    """
    usual = TrainerOptions(
        stochastic_rounding=defaults.rounds_stochastically, min_elements_for_sharding=defaults.min_elements_for_sharding
    )
    usual.update(options)
    found = StepOptions(seed, False if check_numerics is None else check_numerics, digest_every, **usual)
    if check_numerics is None and defaults.checks_numerics and found.scaling is None:
        return replace(found, check_numerics=True)
    return found


def _named(option: Any) -> str:
    """Return an option that may be a function, of which only the name is the same on all instances."""
    return str(getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else option)
