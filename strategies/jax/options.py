"""The options of a training step on JAX, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, final

import jax

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import positive
from strategies.core.options import CommonOptions, CommonOptionsByName, completed, name_of_dtype
from strategies.defaults import Defaults
from strategies.exchange.shards import Shards
from strategies.jax.gradients.arguments import Filter
from strategies.jax.gradients.computation import ReplicaPlan
from strategies.jax.gradients.model_state import ModelStateRule, check_aggregation, has_own
from strategies.jax.gradients.replica_program import Accumulation, Precision, ReplicaProgram, ReplicaShapes, float_dtype
from strategies.jax.programs.recomputation import Policy
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.update import UpdateSettings
from strategies.typing import AccumulationDtype, Tree


class TrainerOptions(CommonOptionsByName, total=False):
    """The options that `Trainer` takes by name; see `StepOptions`."""

    gradient_accumulation_dtype: AccumulationDtype
    offload_optimizer_state: bool | None
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


@final
@dataclass(frozen=True)
class StepOptions(CommonOptions):
    """The options of a training step on JAX; those that PyTorch has too are described in `CommonOptions`.

    Attributes:
        gradient_accumulation_dtype: of the accumulators, and of the gradients that the optimizer gets: None for the
            variable's, a dtype, or a function of the variable.
        offload_optimizer_state: keep optimizer state in host memory between updates (JAX's memory kind
            `pinned_host`). None: as the runtime likes, which is False.
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
        TypeError: see `CommonOptions`.
        ValueError: see `CommonOptions`.
    """

    gradient_accumulation_dtype: AccumulationDtype = None
    offload_optimizer_state: bool | None = None
    stochastic_rounding: bool = False
    recompute: str | Policy = "none"
    model_state_aggregation: Tree = None
    trainable: Filter = None
    pipeline: PipelinePlanner | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_switches(stochastic_rounding=self.stochastic_rounding)
        require_switches_or_none(offload_optimizer_state=self.offload_optimizer_state)
        if self.replicated_optimizer_state_sharding and self.offload_optimizer_state is False:
            raise ValueError(
                "replicated_optimizer_state_sharding=True with offload_optimizer_state=False: the optimizer state must "
                "be offloaded to be sharded, as in the original; leave offload_optimizer_state out or make it True"
            )
        check_aggregation(self.model_state_aggregation)
        _ = self.precision  # which refuses other dtypes
        if self.pipeline is not None:
            self._refuse_with_pipeline()

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
    def accumulation(self) -> Accumulation:
        """The options with which micro-batches become one gradient."""
        return Accumulation(
            positive("gradient_accumulation_count", self.gradient_accumulation_count),
            self.method,
            self.gradient_accumulation_dtype,
            self.map_gradient,
        )

    @cached_property
    def precision(self) -> Precision:
        """In which dtypes replicas compute."""
        return Precision(float_dtype("compute_dtype", name_of_dtype(self.compute_dtype)), self.scaling is not None)

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
        """See `CommonOptions`."""
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
        """See `CommonOptions`."""
        has_own_model_state = has_own(self.model_state_aggregation)
        return super().own_part or ("model state of single replicas" if has_own_model_state else None)

    @property
    def needs_host(self) -> str | None:
        """The option because of which gradients go through the host, in words; None if they may stay on the device."""
        if self.transfer.is_quantised:
            return "gradients travel as int8"
        return None if self.pipeline is None else "replicas are pipelines"

    @property
    def may_fuse(self) -> bool:
        """Whether several steps may be one program."""
        is_plain = self.scaling is None and self.pipeline is None
        return is_plain and not self.transfer.is_quantised and not self.check_numerics

    @property
    def own_terms(self) -> Mapping[str, object]:
        """See `CommonOptions`."""
        return {
            "gradient_accumulation_dtype": _named(self.gradient_accumulation_dtype),
            "map_gradient": _named(self.map_gradient),
            "offload_optimizer_state": self.of_update.offloads_state,
            "stochastic_rounding": self.stochastic_rounding,
            "recompute": _named(self.recompute),
            "model_state_aggregation": self.model_state_aggregation,
            "trainable": _named(self.trainable),
            "pipeline": None if self.pipeline is None else dict(self.pipeline.terms),
        }


def configured(
    seed: int, check_numerics: bool | None, digest_every: int, options: TrainerOptions, defaults: Defaults
) -> StepOptions:
    """Return the options of a step, see `completed`; stochastic rounding, too, is as the defaults say if left out."""
    own = {"seed": seed, "check_numerics": check_numerics, "digest_every": digest_every}
    return completed(StepOptions, defaults, {"stochastic_rounding": defaults.rounds_stochastically, **own, **options})


def _named(option: Any) -> str:
    """Return an option that may be a function, of which only the name is the same on all instances."""
    return str(getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else option)
