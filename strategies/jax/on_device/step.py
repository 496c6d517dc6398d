"""A step that stays on the device: gradients, their means and the update are queued there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.engine import Arrived, Buffers
from strategies.exchange.means import Bucket
from strategies.exchange.on_device import DevicePath
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.gradients.tail import control_words
from strategies.jax.on_device.gradients import DeviceGradients
from strategies.jax.on_device.kept import chosen, model_state_after
from strategies.jax.on_device.scaling import scale_after, scaled_control
from strategies.jax.on_device.update import FlatUpdate
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.update import VariableUpdate
from strategies.loss_scaling import LossScale
from strategies.train_state import TrainState
from strategies.typing import Gradients, Leaf, Tree


@dataclass(frozen=True)
class DeviceStep:
    """A step on the device for batches of certain shapes.

    Attributes:
        program: Computation of a replica.
        bucket: Bucket of all gradients; its means have no memory on the host.
        gradients: Computation of the bucket, and its sums.
        path: Path on which sums become means over all instances.
        update: Update of the variables, with optimizer state whole or in parts.
        flat: The same update, for means in flat buffers.
        replicas: Places of the replicas.
    """

    program: ReplicaProgram
    bucket: Bucket
    gradients: DeviceGradients
    path: DevicePath
    update: VariableUpdate
    flat: FlatUpdate
    replicas: Replicas


@dataclass
class DevicePending:
    """A step on the device that has begun; it is the `PendingStep` and the `Exchange` of the loop.

    Attributes:
        step: Programs of the step.
        state: State before the step.
        control: Control words, see `control_words`.
        notice: 1 if this instance was given a notice, else 0; after `reduce` 1 if any instance was.
        sums: Sums of this instance's nodes, for each buffer.
        kept: Values that each local replica keeps.
        means: Buffers with the means.
        tail: Values that travelled behind the gradients.
        is_finite: Whether the step may be applied; with loss scaling a scalar on the device.
        is_weighted: Whether losses have a weight above 0, or no weights; if not, the step is not applied.
    """

    step: DeviceStep
    state: TrainState
    control: Leaf
    notice: float
    sums: Sequence[Sequence[jax.Array]]
    kept: Sequence[Sequence[jax.Array]]
    means: Sequence[jax.Array] = field(default_factory=tuple)
    tail: Leaf = None
    is_finite: Leaf = True
    is_weighted: bool = True

    @classmethod
    def begun(
        cls,
        step: DeviceStep,
        state: TrainState,
        notice: bool,
        arguments: Callable[[Leaf], tuple[Tree, Sequence[Tree], Tree]],
    ) -> DevicePending:
        """Begin a step, without waiting for the devices.

        Args:
            step: Programs of the step.
            state: State before the step.
            notice: Whether this instance was given a notice.
            arguments: Function of the control words that returns the arguments of `DeviceGradients.sums`.
        """
        control: Leaf = control_words(state.step, notice, 1.0)
        if state.loss_scale is not None:
            control = scaled_control(control, jnp.asarray(state.loss_scale.scale, jnp.float32))
        sums, kept = step.gradients.sums(*arguments(control))
        return cls(step, state, control, float(notice), sums, kept)

    @property
    def buckets(self) -> Iterator[tuple[Bucket, Buffers]]:
        """The only bucket, with the sums of this instance's nodes."""
        yield self.step.bucket, self.sums

    @property
    def exchange(self) -> DevicePending:
        """The exchange of the bucket: the step itself."""
        return self

    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Begin to compute the means. Collective. The notice travels through the hosts, which also compare the call."""
        step, communicator = self.step, self.step.replicas.communicator
        if communicator.size > 1:
            given = np.array([self.notice], np.float32)
            sizes = [buffer.size for buffer in bucket.layout.buffers]
            communicator.all_reduce(given, "max", name=f"{bucket.name} on devices, {step.path.word}: {sizes}")
            self.notice = float(given[0])
        dtypes = [buffer.dtype for buffer in bucket.layout.buffers]
        self.sums = ()
        self.means = step.path.means(bucket.name, contributions, dtypes)

    def arrived(self) -> Arrived:
        """Return the results of the exchange, without reading them."""
        program = self.step.program
        self.tail = self.step.flat.tail_of(self.means[0])
        self.is_finite = True
        if self.state.loss_scale is not None:
            self.is_finite = self.tail[program.places.finite] == 0
        return Arrived(program.names, self.tail, self.notice, self.is_finite, self._gradients, scale_after=scale_after)

    def _gradients(self) -> tuple[Gradients, None]:
        return self.step.flat.unpacked(self.means, self.control)[0], None

    def updated(self, scale: LossScale | None) -> TrainState:
        """Return the state after the step, with the scale of the next loss."""
        state, step, model_state = self.state, self.step, self.model_state()
        trainable = step.program.trainable
        trained, optimizer_state = step.flat.apply(
            trainable.pick(state.variables), state.optimizer_state, self.means, self.control
        )
        variables = trainable.put(state.variables, trained)
        return TrainState(variables, optimizer_state, state.step + 1, scale, None, model_state)

    def model_state(self) -> Tree:
        """Return the model state after the step. Collective if several instances take leaves of replica 0."""
        state, step = self.state, self.step
        if state.model_state is None:
            return None
        of_state = step.flat.state_means(self.means)
        after = model_state_after(step.program, step.replicas, state.model_state, self.kept, of_state)
        return chosen(self.is_finite, after, state.model_state)
