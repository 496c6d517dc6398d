"""One update: gradients of the local replicas, their means over all of them, and new variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from strategies.errors import NonFiniteGradientError
from strategies.loss_scaling import LossScale
from strategies.membership import gather_steps
from strategies.replicas.devices import borrow
from strategies.step.digest import compare
from strategies.step.engine import Prepared, StepEngine, control_of
from strategies.step.metrics import Metrics
from strategies.step.notice import Notice
from strategies.step.options import StepOptions
from strategies.step.step_record import Recorder
from strategies.step.updates import Update
from strategies.strategy import Strategy
from strategies.train_state import TrainState


class SingleStep:
    """Makes one step after another, with the instances that there are.

    Args:
        strategy: connects the instances.
        engine: computes the gradients.
        update: of the variables.
        options: of the step.
        notice: travels with the gradients.
        recorder: is told of every step.

    Attributes:
        metrics: of the last step; None before the first one.
        passes: how often a data set was gone through without training; all instances that are at one step, and in none
            of them, have the same number.
    """

    def __init__(
        self,
        strategy: Strategy,
        engine: StepEngine,
        update: Update,
        options: StepOptions,
        notice: Notice,
        recorder: Recorder,
    ) -> None:
        self.metrics: Metrics | None = None
        self.passes = 0
        self._strategy = strategy
        self._engine = engine
        self._update = update
        self._options = options
        self._notice = notice
        self._recorder = recorder

    @property
    def is_recorded(self) -> bool:
        """Whether every step is recorded."""
        return self._recorder.is_on

    def make(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """See `Trainer.step`. Errors of collectives inside of the loss function are those that were raised there."""
        reducer = self._strategy.reducer
        reducer.begin()
        try:
            return self._make(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if reducer.last_error not in (None, error):
                raise reducer.last_error from error
            raise
        finally:
            reducer.end()

    def _make(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        every = self._options.digest_every
        if every and state.step and state.step % every == 0:
            state = self._compared(state)
        step = self._engine.prepare(state, batch)
        if self.metrics is None:
            self.metrics = _metrics_of(step, np.zeros_like(step.gradients.tail), state.loss_scale)
        control = control_of(state, self._notice.is_given)
        self._engine.begin(step, state, batch, control)
        for bucket, contributions in self._engine.collect(step):
            self._update.wait()  # the last one may still be reading the results
            step.exchange.reduce(bucket, contributions)
        self._raise_if_feeds_differ()
        residuals = None if state.residuals is None else _joined(step.gradients.kept())
        tail = step.gradients.tail.copy()
        self._notice.agree(tail[step.program.notice_place])
        if self._options.check_numerics:
            self._raise_if_not_finite(state, tail[-step.program.flags :])
        variables, optimizer_state, scale = state.variables, state.optimizer_state, state.loss_scale
        is_finite = True
        if self._options.scaling is not None:
            assert scale is not None
            is_finite = bool(tail[step.program.finite_place] == 0)
            scale = self._options.scaling.after(scale, is_finite)
        self._recorder.reduced(state, batch, step.means, self._update.mean_shards)
        if is_finite:
            variables, optimizer_state = self._update.apply(variables, optimizer_state, step.means, control)
        else:
            residuals = state.residuals
        self.metrics = _metrics_of(step, tail, scale)
        after = TrainState(variables, optimizer_state, state.step + 1, scale, residuals)
        self._recorder.updated(after, self.metrics)
        return after, self.metrics

    def catch_up(self, state: TrainState) -> TrainState | None:
        """After a loss: the state of the instances that are ahead of this one, and their `metrics`; None where none is.

        No instance is ahead by more than a step: it would need what the others contribute to the next one.
        """
        return self.meet(state)[0]

    def meet(self, state: TrainState, batches: int = 0) -> tuple[TrainState | None, np.ndarray]:
        """As `catch_up`, with instances that may be in different passes or steps.

        Args:
            state: of this instance.
            batches: of its pass, of which it knows what all replicas have told; 0 outside of a pass.

        Returns:
            See `catch_up`; and for each instance its `passes` and batches, int64 `[instances, 2]`.
        """
        self._engine.claim_replicas()
        place = np.array([self.passes, batches])
        places = self._strategy.communicator.all_gather(place, name="passes and batches that were reached")
        return self._brought_up(state), places

    def _brought_up(self, state: TrainState) -> TrainState | None:
        steps = gather_steps(self._strategy, state.step)
        newest = int(steps.max())
        if newest == steps.min():
            return None
        means = self.metrics.means if self.metrics is not None and newest else np.zeros(0, np.float32)
        variables, optimizer_state, scale, means = self._strategy.broadcast(
            (state.variables, state.optimizer_state, state.loss_scale, means), int(steps.argmax())
        )
        if state.step == newest:
            return None
        if self.metrics is not None:
            self.metrics = Metrics(self.metrics.names, np.asarray(means))
            self._notice.agree(float(self.metrics.means[len(self.metrics.names)]))
        return TrainState(variables, optimizer_state, newest, scale)

    def take_over(self, metrics: Metrics) -> None:
        """Several steps were made otherwise; `metrics` are those of the last one."""
        self.metrics = metrics
        self._notice.agree(self._notice.is_given)

    def _compared(self, state: TrainState) -> TrainState:
        """The state, or that of most instances where this one has other bits."""
        own = replace(state, residuals=None, optimizer_state=None if self._update.is_sharded else state.optimizer_state)
        compared: TrainState = compare(self._strategy, own, state.step)
        if self._update.is_sharded:
            compared = replace(compared, optimizer_state=state.optimizer_state)
        return replace(compared, residuals=state.residuals)

    def _raise_if_feeds_differ(self) -> None:
        """The replicas have ended their programs, and the state is still what it was."""
        reducer = self._strategy.reducer
        reducer.end()
        if reducer.last_error is not None:
            raise reducer.last_error

    def _raise_if_not_finite(self, state: TrainState, flags: np.ndarray) -> None:
        if not flags.any():
            return
        leaf, replica = divmod(int(np.flatnonzero(flags)[0]), self._strategy.num_replicas_in_sync)
        path, _ = jax.tree_util.tree_leaves_with_path(state.variables)[leaf]
        replicas = np.flatnonzero(flags.reshape(-1, self._strategy.num_replicas_in_sync).any(axis=0)).tolist()
        raise NonFiniteGradientError(
            f"the gradient of variable {jax.tree_util.keystr(path)} on replica {replica} is not finite at step "
            f"{state.step} (first of the replicas {replicas}); the step was not applied: lower the learning rate, "
            "clip the gradients, or look at that replica's batch"
        )


def _metrics_of(step: Prepared, tail: np.ndarray, scale: LossScale | None) -> Metrics:
    names = step.program.names
    if scale is None:
        return Metrics(names, tail)
    own, rest = np.split(tail, [len(names)])
    of_scale = np.array([scale.scale, scale.skipped], np.float32)
    return Metrics((*names, "loss_scale", "skipped_steps"), np.concatenate([own, of_scale, rest]))


def _joined(kept: Sequence[Sequence[jax.Array]]) -> list[Any]:
    """What replicas keep, with all of them along the first axis."""
    if len(kept) == 1:
        return list(kept[0])
    return [np.concatenate([borrow(leaf) for leaf in leaves]) for leaves in zip(*kept, strict=True)]
