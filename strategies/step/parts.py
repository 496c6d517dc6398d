"""The parts of a step, put together as its options want them."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.gradients.arguments import check_loss_function, check_optimizer
from strategies.gradients.replica_program import LossFunction
from strategies.replicas.replicas import Replicas
from strategies.step.executions import Executions
from strategies.step.jax_engine import JaxEngine
from strategies.step.metrics import StepNotice
from strategies.step.options import StepOptions
from strategies.step.single_step import SingleStep
from strategies.step.states import TrainStates
from strategies.step.step_record import recorder_for
from strategies.updates.gathered_update import update_for
from strategies.updates.optimizers import AnyOptimizer, MapGradientOptimizer, StepOptimizer


@dataclass(frozen=True)
class StepParts:
    """What trains variables on some replicas.

    Attributes:
        states: makes the first state.
        single: makes a step.
        executions: makes several.
    """

    states: TrainStates
    single: SingleStep
    executions: Executions

    @classmethod
    def of(
        cls,
        replicas: Replicas,
        loss_fn: LossFunction,
        optimizer: AnyOptimizer,
        options: StepOptions,
        notice: StepNotice,
    ) -> StepParts:
        """Those that compute with JAX.

        Args:
            replicas: where the replicas are.
            loss_fn: see `Trainer`.
            optimizer: see there.
            options: of the step.
            notice: travels with the gradients.

        Raises:
            TypeError: if the loss function or the optimizer is none.
        """
        check_loss_function(loss_fn)
        if not isinstance(optimizer, StepOptimizer):
            check_optimizer(optimizer)
        update = update_for(replicas, optimizer, options.of_update)
        recorder = recorder_for(replicas, options)
        others = [
            options.map_gradient,
            None if isinstance(optimizer, StepOptimizer | MapGradientOptimizer) else optimizer.update,
        ]
        traced = [one for one in others if one is not None]
        engine = JaxEngine(replicas, loss_fn, options, update, recorder.is_on, traced)
        single = SingleStep(replicas, engine, update, options, notice, recorder)
        executions = Executions(replicas, engine, update, single, options.may_fuse)
        return cls(TrainStates(replicas, loss_fn, options, update, single), single, executions)
