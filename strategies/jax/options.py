"""The options of a training step on JAX, and the options that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
from typing_extensions import override

from popdist.switches import require_switches, require_switches_or_none
from strategies.core.options import CommonOptions, CommonOptionsByName, completed, name_of_dtype
from strategies.defaults import Defaults
from strategies.jax.gradients.computation import Filter
from strategies.jax.gradients.gradient_programs import PipelinePlanner
from strategies.jax.gradients.model_state import ModelStateRule, check_aggregation, has_own
from strategies.jax.gradients.replica_program import cast, float_dtype
from strategies.jax.programs.recomputation import Policy
from strategies.typing import AccumulationDtype, Tree


class TrainerOptions(CommonOptionsByName, total=False):
    """The options that `Trainer` takes by name, described in `StepOptions`."""

    gradient_accumulation_dtype: AccumulationDtype
    offload_optimizer_state: bool | None
    stochastic_rounding: bool
    recompute: str | Policy
    model_state_aggregation: Tree
    trainable: Filter
    pipeline: PipelinePlanner | None


@final
@dataclass(frozen=True)
class StepOptions(CommonOptions):
    """The options of a training step on JAX; `CommonOptions` describes the options shared with PyTorch.

    Attributes:
        gradient_accumulation_dtype: Dtype of the accumulators, and of the gradients that the optimizer gets: None for
            the variable's own, a dtype, or a function of the variable.
        offload_optimizer_state: Whether optimizer state is kept in host memory between updates (JAX's memory kind
            `pinned_host`). None: the runtime's default, which is False.
        stochastic_rounding: Whether the sum of a 16-bit variable and its change is rounded stochastically.
        recompute: Values of the forward pass that the backward pass computes again (Chen et al., 2016): "none",
            "blocks" (the values between `recomputation_checkpoint`s) or a policy of `jax.checkpoint_policies`.
        model_state_aggregation: Rule by which replicas agree on the model state after each step: one word for all of
            it, or a pytree of words, a prefix of the model state. "mean": the mean over all replicas in order. "first":
            replica 0's value. "per_replica": each replica keeps its own. "sum":
            replicas begin at zero, and the sum over all replicas is added to the old value. "alike": every replica
            computes the same value, so nothing travels. "constant": the value stays. None: the mean of floating-point
            leaves, and replica 0's value of others.
        trainable: Choice of the trained variables; None for all. It is a function `(name, variable) -> bool` of names
            such as `['dense']['kernel']`, or a pytree of bools that is a prefix of the variables. Other variables keep
            their bits, may have any dtype, and have no gradients. The optimizer state is made for a tree with None in
            their places.
        pipeline: Cut of a replica into stages that run on several devices, or None. Not with `recompute`, because a
            pipeline recomputes by itself.

    Raises:
        TypeError: An option has a wrong type, see `CommonOptions`.
        ValueError: An option has a wrong value, or options exclude each other; see `CommonOptions`.
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
        self.cast(None)  # raises if the dtype is not a float
        if self.pipeline is not None:
            self._check_pipeline_options()

    def _check_pipeline_options(self) -> None:
        if self.map_gradient is not None and self.scaling is not None:
            raise ValueError(
                "in a pipeline map_gradient would get gradients that loss_scaling has multiplied; use only one of them"
            )
        if self.recompute != "none":
            raise ValueError(
                f"recompute is {_named(self.recompute)!r}, but the stages of a pipeline recompute by themselves; leave "
                "recompute out, and use Pipelining(recompute=True)"
            )

    def cast(self, tree: Tree) -> Tree:
        """Return a tree whose floating-point arrays have the dtype in which replicas compute."""
        return cast(tree, float_dtype("compute_dtype", name_of_dtype(self.compute_dtype)))

    def rule_of(self, model_state: Tree) -> ModelStateRule:
        """Return the rule by which replicas agree on this model state.

        Raises:
            ValueError: See `ModelStateRule.of`.
        """
        return ModelStateRule.of(model_state, self.model_state_aggregation if model_state is not None else None)

    def shapes_of_replica(self, model_state: Tree) -> Tree:
        """Return the shapes and dtypes of one replica's part of a model state."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model_state)
        return self.rule_of(shapes).map_own(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)

    @property
    @override
    def shards_state(self) -> bool:
        shards = self.replicated_optimizer_state_sharding
        return bool(self.offload_optimizer_state if shards is None else shards)

    @property
    @override
    def unrecoverable_part(self) -> str | None:
        has_own_model_state = has_own(self.model_state_aggregation)
        return super().unrecoverable_part or ("model state of single replicas" if has_own_model_state else None)

    @property
    @override
    def own_terms(self) -> Mapping[str, object]:
        return {
            "gradient_accumulation_dtype": _named(self.gradient_accumulation_dtype),
            "map_gradient": _named(self.map_gradient),
            "offload_optimizer_state": bool(self.offload_optimizer_state),
            "stochastic_rounding": self.stochastic_rounding,
            "recompute": _named(self.recompute),
            "model_state_aggregation": self.model_state_aggregation,
            "trainable": _named(self.trainable),
            "pipeline": None if self.pipeline is None else dict(self.pipeline.terms),
        }


def configured(
    seed: int, check_numerics: bool | None, digest_every: int, options: TrainerOptions, defaults: Defaults
) -> StepOptions:
    """Return the options of a step; the defaults decide options that are left out, stochastic rounding included."""
    own = {"seed": seed, "check_numerics": check_numerics, "digest_every": digest_every}
    return completed(StepOptions, defaults, {"stochastic_rounding": defaults.rounds_stochastically, **own, **options})


def _named(option: Any) -> str:
    """Return the name of a function, because only that is equal on all instances; other options as text."""
    return str(getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else option)
