"""The first state of a training, and how much of a state an instance has."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from strategies.exchange.int8 import Int8Layout
from strategies.gradients.arguments import Trainable, check_takes_state, check_variables
from strategies.gradients.model_state import as_arrays, check_model_state
from strategies.replicas.membership import surviving, warn_of_loss
from strategies.replicas.replicas import Replicas
from strategies.replicas.shards import rows_of
from strategies.step.options import StepOptions
from strategies.step.single_step import SingleStep
from strategies.train_state import TrainState
from strategies.typing import LossFunction, Tree, Variables
from strategies.updates.update import VariableUpdate


class TrainStates:
    """Knows which parts of a state only this instance has.

    Args:
        replicas: where the replicas are.
        loss_fn: which is to take the model state, if there is one.
        options: of the step.
        update: of the variables; it makes the optimizer state.
        single: makes the steps that follow.
    """

    def __init__(
        self,
        replicas: Replicas,
        loss_fn: LossFunction,
        options: StepOptions,
        update: VariableUpdate,
        single: SingleStep,
    ) -> None:
        self._replicas = replicas
        self._loss_fn = loss_fn
        self._single = single
        self._options = options
        self._update = update

    def init(self, variables: Variables, model_state: Tree) -> TrainState:
        """Return the first state on all instances; see `Trainer.init`."""
        return self.adopt(TrainState(variables, None, 0, model_state=model_state))

    def adopt(self, state: TrainState) -> TrainState:
        """Instance 0's state on all instances; see `Trainer.adopt`."""
        check_takes_state(self._loss_fn, state.model_state is not None)
        single = self._single
        variables, model_state = self._checked(state.variables, state.model_state)
        first = replace(state, variables=variables, model_state=model_state)

        def catch_up() -> TrainState | None:
            meeting = single.meet()
            return single.share(self._first(first), meeting.newest) if meeting.is_late else None

        def attempt() -> TrainState:
            broadcast, step = self._replicas.broadcast((first, np.int32(first.step)))
            return self._first(replace(broadcast, step=int(step)))

        if part := self._options.own_part:
            warn_of_loss(self._replicas, f"every instance has a part of the state that no other has ({part})")
            return attempt()
        return surviving(self._replicas, attempt, catch_up, single.share)

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` wherever this instance has only a part of an array."""
        of_all = rows_of(self._replicas)
        return replace(
            state,
            optimizer_state=self._update.whole(state.optimizer_state),
            residuals=jax.tree.map(of_all, state.residuals),
            model_state=self._options.rule_of(state.model_state).map_own(of_all, state.model_state),
        )

    def _checked(self, variables: Variables, model_state: Tree) -> tuple[Variables, Tree]:
        """Return the variables and model state of a first state, as arrays; raises what `Trainer.init` does."""
        check_variables(variables, self._options.trainable)
        check_model_state(model_state)
        arrays = as_arrays(model_state)
        self._options.rule_of(arrays)
        return variables, arrays

    def _first(self, state: TrainState) -> TrainState:
        """Return the state, with what this instance keeps of it, and with what it has not got yet."""
        scaling, place = self._options.scaling, self._replicas.devices.place
        trained = Trainable.of(state.variables, self._options.trainable).pick(state.variables)
        local = len(self._replicas.local_replicas)
        residuals = None
        if self._options.transfer.is_quantised:
            residuals = list(map(place, Int8Layout.of(jax.tree.leaves(trained)).new_residuals(local)))
        scale = state.loss_scale
        if scaling is not None and scale is None:
            scale = scaling.start()
        rule = self._options.rule_of(state.model_state)
        of_all = rule.map_own(lambda leaf: place(np.stack([leaf] * local)), state.model_state)
        given = state.optimizer_state
        optimizer_state = self._update.init(trained) if given is None else self._update.adopt(trained, given)
        return TrainState(state.variables, optimizer_state, state.step, scale, residuals, of_all)
