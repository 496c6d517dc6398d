"""A step that stays on the device: gradients, their means and the update are queued there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from collectives.tree import TreeNode, add_last
from strategies.core.agreement import gather_arrays
from strategies.core.engine import Buffers
from strategies.core.metrics import UnreadArray
from strategies.errors import StrategyError
from strategies.exchange.choice import DevicePath
from strategies.exchange.flat import FlatLayout
from strategies.exchange.means import Bucket
from strategies.jax.comparing.agreement import digest_of
from strategies.jax.gradients.gradient_programs import JaxGradientPlan
from strategies.jax.gradients.model_state import ALIKE, FIRST, LOSS_SCALE, PER_REPLICA, ModelStateRule
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.on_device.paths import JaxArithmetic
from strategies.jax.programs.compilation import jit
from strategies.jax.replicas.devices import ReplicaDevices
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.update import VariableUpdate, WholeStateUpdate
from strategies.loss_scaling import MOST, LossScale, LossScaling
from strategies.typing import Gradients, Leaf, OptimizerState, Tree, Variables
from strategies.values import TrainState

MOST_STEPS = 8
"""The most steps that may have begun before the oldest one has ended. They keep their batches in memory."""


class StepQueue:
    """The steps in progress, each with an array that is ready when the step has ended."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, UnreadArray]] = deque()

    def add(self, step: int, ready: UnreadArray) -> None:
        """Add a step that has begun.

        Args:
            step: Number of the step, from 0.
            ready: Array that the step computes.
        """
        self._steps.append((step, ready))

    def await_room(self) -> None:
        """Wait until one more step may be begun.

        At this point the next step has used up nothing. A KeyboardInterrupt mostly comes here, and leaves the state
        usable.

        Raises:
            StrategyError: A step has failed on the devices; the message has its number.
        """
        while self._steps and (len(self._steps) >= MOST_STEPS or _has_ended(self._steps[0][1])):
            last = self._steps[-1][0]
            number, oldest = self._steps.popleft()
            try:
                if not oldest.is_deleted():
                    oldest.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                self._steps.clear()
                raise StrategyError(
                    f"step {number} has failed on the device, and step {last} was the last one begun: {error}; go on "
                    "from a checkpoint"
                ) from error


def _has_ended(array: UnreadArray) -> bool:
    return bool(array.is_deleted() or array.is_ready())


@jax.jit
def scaled_control(control: jax.Array, scale: jax.Array) -> jax.Array:
    """Return control words with the scale of the loss; traceable."""
    return control.at[LOSS_SCALE].set(jax.lax.bitcast_convert_type(scale, jnp.int32))


def scale_after(scaling: LossScaling, last: LossScale, is_finite: jax.Array) -> LossScale:
    """Return the scale of the next loss, with the bits of `LossScaling.after`, without waiting for the device.

    Args:
        scaling: Rule of the scale.
        last: Scale of this step's loss.
        is_finite: Whether its gradients are finite, a bool scalar.
    """
    factor = np.array([scaling.factor], np.float64).view(np.int32)
    found: LossScale = _scale_after(last, is_finite, factor, scaling.initial, scaling.interval)
    return found


def _after(last: LossScale, is_finite: jax.Array, factor: jax.Array, initial: float, interval: int) -> LossScale:
    """Return the next scale, computed in float64 as on the host; traceable.

    Args:
        last: Scale of this step's loss.
        is_finite: Whether its gradients are finite, a bool scalar.
        factor: Bits of the factor, int32 [2]; an argument, because XLA multiplies by the reciprocal of a constant.
        initial: `LossScaling.initial`.
        interval: `LossScaling.interval`.
    """
    good, skipped = jnp.asarray(last.good_steps, jnp.int32) + 1, jnp.asarray(last.skipped, jnp.int32)
    with jax.enable_x64(True):
        scale, by = jnp.asarray(last.scale).astype(jnp.float64), jax.lax.bitcast_convert_type(factor, jnp.float64)
        lower = jnp.maximum(scale / by, min(1.0, initial)).astype(jnp.float32)
        higher = jnp.minimum(scale * by, MOST).astype(jnp.float32)
        same = scale.astype(jnp.float32)
        is_due = is_finite & (good >= interval) & (by > 1)
    return LossScale(
        jnp.where(is_finite, jnp.where(is_due, higher, same), lower),
        jnp.where(is_finite & ~is_due, good, 0).astype(jnp.int32),
        jnp.where(is_finite, skipped, skipped + 1),
    )


_scale_after = jax.jit(_after, static_argnums=(3, 4))


class DeviceGradients:
    """The gradients of the local replicas, computed one after another on each device, and their sums.

    Two sums are added as soon as both exist. So at most one sum per level of the tree is alive, and one more. A sum
    lies on the device of its first replica.

    Args:
        devices: Devices of the local replicas.
        plan: Program of a replica, which makes its buffers.
        nodes: Nodes of the tree that are added here; together they are the local replicas.
        replicas: R.
    """

    def __init__(
        self, devices: ReplicaDevices, plan: JaxGradientPlan, nodes: Sequence[TreeNode], replicas: int
    ) -> None:
        self._devices = devices
        self._plan = plan
        self._nodes = nodes
        self._replicas = replicas
        self._arithmetic = JaxArithmetic()
        self._bucket = Bucket("gradients", plan.layout, (), frozenset())  # its means have no memory on the host
        self._sums: list[tuple[TreeNode, list[jax.Array]]] = []
        self._kept: list[list[jax.Array]] = []

    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        """Begin to compute the sums of the nodes, without waiting for the devices.

        Args:
            variables: Variables, as in `ReplicaGradients.dispatch`.
            of_replicas: Arguments of each local replica, as in `ReplicaGradients.dispatch`.
            others: Shared arguments, as in `ReplicaGradients.dispatch`.
        """
        shared = [[jax.tree.leaves(tree) for tree in trees] for trees in self._devices.share((variables, others))]
        self._sums, self._kept = [], []  # sums are left if a step was given up
        count = len(self._plan.layout.buffers)
        for position, replica in enumerate(self._devices.replicas):
            first, last = shared[position % len(shared)]
            device = self._devices.device_of(position)
            own = self._moved(jax.tree.leaves(of_replicas[position]), device)
            results = self._plan.compiled(device)(*first, *own, *last)
            self._sums.append((TreeNode(replica, replica + 1), list(results[:count])))
            self._kept.append(list(results[count:]))
            add_last(self._sums, self._nodes, self._replicas, self._total)

    def collect(self) -> Iterator[tuple[Bucket, Sequence[Sequence[jax.Array]]]]:
        """Yield the only bucket, with the sums of the nodes on the first device for each buffer, once."""
        sums, self._sums = self._sums, []
        on_first = [self._moved(buffers, self._devices.devices[0]) for _, buffers in sums]
        yield self._bucket, [list(of_buffer) for of_buffer in zip(*on_first, strict=True)]

    def kept(self) -> list[list[jax.Array]]:
        """Return the values that each local replica keeps for its next step, once."""
        kept, self._kept = self._kept, []
        return kept

    def _total(self, nodes: tuple[TreeNode, TreeNode], one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
        return self._arithmetic.totals(nodes, [one, self._moved(other, next(iter(one[0].devices())))])

    def _moved(self, buffers: list[Leaf], device: jax.Device) -> list[Leaf]:
        return buffers if len(set(self._devices.devices)) == 1 else jax.device_put(buffers, device)


def _check_alike(rule: ModelStateRule, replicas: Replicas, alike: Sequence[Sequence[Leaf]]) -> None:
    """Check that all replicas have made the same "alike" leaves of the model state. Collective.

    Raises:
        ValueError: On all instances, if a replica has made another value than replica 0.
    """
    names = [name for name, word in zip(rule.names, rule.reductions, strict=True) if word == ALIKE]
    digests = [[np.array(digest_of(leaf), np.uint64) for leaf in leaves] for leaves in alike]
    first, *others = gather_arrays(replicas, digests, "digests of leaves of the model state that are alike")
    for replica, own in enumerate(others, 1):
        different = [name for name, one, other in zip(names, first, own, strict=True) if (one != other).any()]
        if different:
            raise ValueError(
                f"replica {replica} has made another value of leaf {different[0]} of the model state than replica 0, "
                "but model_state_aggregation has 'alike' for it; use 'first', 'mean' or 'per_replica'"
            )


def model_state_after(
    program: ReplicaProgram,
    replicas: Replicas,
    step: int,
    before: Tree,
    kept: Sequence[Sequence[jax.Array]],
    result: Mapping[str, Sequence[Tree]],
    join: Callable[[Sequence[Sequence[jax.Array]]], Sequence[Tree]],
) -> Tree:
    """Return the new model state. Collective if several instances take leaves of replica 0, or compare "alike" leaves.

    Args:
        program: Computation of a replica.
        replicas: Places of the replicas.
        step: Number of the step, from 0.
        before: Model state before the step.
        kept: Values that each local replica keeps.
        result: New leaves that have means over all replicas, see `ModelStateRule.put_means`.
        join: Function that joins the replicas' own leaves along their first axis.
    """
    of_state = [program.unpack_kept(of_replica) for of_replica in kept]
    new = {**of_state[0], **result}
    if new[ALIKE] and not replicas.is_spare and step & (step - 1) == 0:  # in few steps, because digests take time
        _check_alike(program.rule, replicas, [each[ALIKE] for each in of_state])
    if new[FIRST] and replicas.communicator.size > 1:  # replica 0 is on the first instance
        new[FIRST] = replicas.broadcast(new[FIRST])
    if new[PER_REPLICA]:
        new[PER_REPLICA] = replicas.devices.place(join([each[PER_REPLICA] for each in of_state]))
    return program.rule.put(before, new)


@jax.jit
def _joined(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the replicas' arrays one behind the other along the first axis."""
    return jnp.concatenate(leaves)


@jax.jit
def _chosen(is_finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(is_finite, new, old)


def chosen(is_finite: Leaf, new: Tree, old: Tree) -> Tree:
    """Return the new model state if the step may be applied, else the old one, without waiting for the flag."""
    if is_finite is True:
        return new
    return jax.tree.map(lambda one, other: _chosen(_flag_near(is_finite, one), one, other), new, old)


def _flag_near(is_finite: Leaf, leaf: jax.Array) -> Leaf:
    """Return the flag on all devices of a leaf. A leaf has several devices if each replica has its own part of it."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(is_finite, sharding)


Unpacked: TypeAlias = tuple[Gradients, jax.Array, jax.Array]
"""Mean gradients like the trained variables, the tail, and control words with the mean loss and weight."""


class FlatUpdate:
    """The update of the variables by mean gradients in flat buffers.

    If every instance has all of the optimizer state, one program unpacks the buffers and updates the variables.
    Otherwise the update is a program of its own.

    Args:
        program: Computation of a replica, whose results are in the buffers.
        update: Update of the variables.
        layout: Layout of the buffers.
        structure: Structure of the trained variables.

    Attributes:
        unpacked: Function that returns the contents of the buffers, except means of the model state.
        tail_of: Function that returns the tail that lies in the first buffer, with weighted means if losses have
            weights.
        state_means: Function that returns the means of leaves of the model state.
    """

    def __init__(self, program: ReplicaProgram, update: VariableUpdate, layout: FlatLayout, structure: Tree) -> None:
        self._program = program
        self._update = update
        self._layout = layout
        self._structure = structure
        self._scales = program.places.has_finite
        self.unpacked: Callable[[Sequence[jax.Array], Leaf], Unpacked] = jit(self._unpacked)
        self.tail_of: Callable[[jax.Array], jax.Array] = jit(
            lambda buffer: program.places.weighted(layout.tail_view([buffer]))
        )
        self.state_means = jit(lambda buffers: layout.views(buffers)[program.num_gradients :])
        self._at_once = None
        if isinstance(update, WholeStateUpdate) and not update.has_parts:
            self._whole = update
            self._at_once = update.compiled_once(jit(self._updated, donate_argnums=(0, 1)))

    def apply(
        self,
        variables: Variables,
        optimizer_state: OptimizerState,
        buffers: Sequence[jax.Array],
        control: Leaf,
    ) -> tuple[Variables, OptimizerState]:
        """Return new variables and optimizer state; the old ones are used up.

        With loss scaling nothing changes if a gradient is not finite. The host has to wait for this check only if the
        optimizer state is cut into parts on several instances.

        Args:
            variables: Trained variables.
            optimizer_state: Optimizer state of these variables.
            buffers: Buffers with the means.
            control: Control words, see `control_words`.
        """
        if self._at_once is not None:
            state = self._whole.on_device(optimizer_state)
            variables, state = self._at_once(variables, state, buffers, control)
            return variables, self._whole.offloaded(state)
        means, tail, control = self.unpacked(buffers, control)
        if self._scales and not self._is_finite(np.asarray(tail)):
            return variables, optimizer_state
        return self._update.apply(variables, optimizer_state, means, control)

    def _updated(
        self, variables: Variables, optimizer_state: OptimizerState, buffers: Sequence[jax.Array], control: jax.Array
    ) -> tuple[Variables, OptimizerState]:
        means, tail, control = self._unpacked(buffers, control)
        trained, state, _ = self._whole.traced(variables, optimizer_state, means, control)
        if not self._scales:
            return trained, state
        is_finite = self._is_finite(tail)
        before = variables, optimizer_state
        trained, state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), (trained, state), before)
        return trained, state

    def _is_finite(self, tail: Tree) -> Tree:
        return tail[self._program.places.finite] == 0

    def _unpacked(self, buffers: Sequence[jax.Array], control: jax.Array) -> Unpacked:
        # Behind a barrier, as if each were an argument: if XLA fused the cut into the update, it could round otherwise.
        leaves, tail = jax.lax.optimization_barrier((self._layout.views(buffers), self._layout.tail_view(buffers)))
        means = jax.tree.unflatten(self._structure, leaves[: self._program.num_gradients])
        control = self._program.places.with_means(jnp.asarray(control), self._program.places.weighted(tail))
        return means, tail, control


# ---- the step


@dataclass(frozen=True)
class DeviceStep:
    """A step on the device for batches of certain shapes, with the methods of `HostStep`; no method waits.

    Attributes:
        program: Computation of a replica.
        gradients: Computation of the bucket of all gradients, and its sums.
        path: Path on which sums become means over all instances.
        update: Update of the variables, with optimizer state whole or in parts.
        flat: The same update, for means in flat buffers.
        replicas: Places of the replicas.
    """

    program: ReplicaProgram
    gradients: DeviceGradients
    path: DevicePath
    update: VariableUpdate
    flat: FlatUpdate
    replicas: Replicas
    scale_after: ClassVar = staticmethod(scale_after)

    def reduce(self, bucket: Bucket, contributions: Buffers, notice: float) -> tuple[Sequence[jax.Array], float]:
        """Begin to compute the means. Collective. The notice travels through the hosts, which also compare the call."""
        communicator, buffers = self.replicas.communicator, bucket.layout.buffers
        if communicator.size > 1:
            given = np.array([notice], np.float32)
            sizes = [buffer.size for buffer in buffers]
            communicator.all_reduce(given, "max", name=f"{bucket.name} on devices, {self.path.path_name}: {sizes}")
            notice = float(given[0])
        return self.path.means(bucket.name, contributions, [buffer.dtype for buffer in buffers]), notice

    def mean_gradients(self, buffers: Sequence[jax.Array], control: Leaf) -> tuple[Gradients, None]:
        """Return the mean gradients; none is cut."""
        return self.flat.unpacked(buffers, control)[0], None

    def update_arguments(self, buffers: Sequence[jax.Array], control: Leaf, tail: Leaf) -> tuple[Gradients, Leaf]:
        """Return the mean gradients for the update, and the control words with the mean loss and weight."""
        means, _, control = self.flat.unpacked(buffers, control)
        return means, control

    def model_state(self, before: TrainState, buffers: Sequence[jax.Array], is_finite: Leaf) -> Tree:
        """Return the model state after the step. Collective if several instances take leaves of replica 0.

        Only those leaves wait for the device.
        """
        result = self.program.rule.put_means(before.model_state, self.flat.state_means(buffers), jnp)

        def join(own: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
            return [_joined(rows) for rows in zip(*jax.device_put(own, self.replicas.variables_device), strict=True)]

        kept = self.gradients.kept()
        after = model_state_after(self.program, self.replicas, before.step, before.model_state, kept, result, join)
        return chosen(is_finite, after, before.model_state)
