"""The steps of an instance's replicas with one LightningModule: training, and evaluations of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from strategies.errors import StrategyError
from strategies.strategy import Strategy
from strategies.torch.distributed_model.model import DistributedModel
from strategies.torch.lightning.loader import ReplicaBatches
from strategies.torch.lightning.metrics import ReplicaMetric, StepLogs, metrics_of
from strategies.torch.options import number_of, one_of, states_to
from strategies.torch.replicas.generators import drawing_from, seed_of
from strategies.torch.replicas.state import Attributes
from strategies.typing import Batch, Tree
from strategies.values import Outcome

_OUTSIDE = 2**40  # the first micro-batch in the seeds of random numbers that are drawn outside of training steps
_TRANSFER, _STEP = 1, 2
_TRAINING = "training_step"


class ReplicaSteps:
    """The steps of the local replicas, one replica after another.

    Args:
        lightning: The strategy of Lightning's Trainer, which has the module, the device, and the plugin for precision.
        strategy: The strategy of the replicas.

    Attributes:
        batches: The number of batches since a loop began. Random numbers outside of training steps depend on it.
        steps_made: The number of averaged backward passes so far.
        steps_before: The `steps_made` when the last batch began.
    """

    def __init__(self, lightning: ParallelStrategy, strategy: Strategy) -> None:
        self._lightning, self._strategy = lightning, strategy
        self._model: DistributedModel | None = None
        self._means: Sequence[torch.Tensor | None] = ()
        self._seed = self.batches = self.steps_made = self.steps_before = 0

    @property
    def module(self) -> pl.LightningModule:
        """The module."""
        assert self._lightning.lightning_module is not None
        return self._lightning.lightning_module

    def begin(self, seed: int) -> None:
        """Begin a training or an evaluation with a seed of random numbers."""
        self.disconnect()
        self._seed, self.batches, self.steps_before = seed, 0, self.steps_made

    def connect(self, **options: Tree) -> None:
        """Connect the module's gradients with those of the other instances. Collective.

        Args:
            options: The options of `DistributedModel`.
        """
        self._model = DistributedModel(self.module, self._strategy, seed=self._seed, **options)
        self._model.compute_with(self._attributes)

    def disconnect(self) -> None:
        """Free the memory of a training."""
        self._model, self._means = None, ()
        for metric in vars(self).pop("_metrics", ()):
            metric.disconnect()
        if "_attributes" in vars(self):
            vars(self).pop("_attributes").show()

    @cached_property
    def _attributes(self) -> Attributes:
        return Attributes(self.module, (*vars(pl.LightningModule()), "forward"), (Metric,))

    @cached_property
    def _metrics(self) -> Sequence[ReplicaMetric]:
        return metrics_of(self.module, self._strategy)

    def _logs(self, is_training: bool) -> StepLogs:
        return StepLogs(self.module, self._strategy, self._metrics, is_training)

    # ---- random numbers

    def next_batch(self) -> None:
        """Count a batch of all replicas."""
        self.batches += 1
        self.steps_before = self.steps_made

    def _drawing(self, replica: int, purpose: int) -> AbstractContextManager[None]:
        place = _OUTSIDE + (self.batches << 2) + purpose
        return drawing_from(seed_of(self._seed, replica, self.steps_made, place), self._lightning.root_device)

    def mapped(self, function: Callable[[Batch], Batch], batch: ReplicaBatches) -> ReplicaBatches:
        """Map the batch of each replica with a function that draws the replica's random numbers."""

        def one(replica: int, rows: Batch) -> Batch:
            with self._drawing(replica, _TRANSFER):
                return function(rows)

        return batch.map(one)

    # ---- training

    def train(self, batch: ReplicaBatches, others: Sequence[Tree], named: Mapping[str, Tree]) -> Tree:
        """Compute the mean gradients of all replicas, which the backward pass of the mean loss adds. Collective.

        Args:
            batch: The batches.
            others: The arguments of `training_step` after the batch.
            named: Its arguments by name.

        Returns:
            The mean loss; in a dictionary with lists of the local replicas' values if `training_step` returns one.
        """
        precision = self._lightning.precision_plugin
        if not self.module.automatic_optimization:  # the only replica of the job calls the optimizers by itself
            [output] = self.run(_TRAINING, precision.train_step_context, batch, others, named)
            self.steps_made += 1
            return output
        if (model := self._model) is None:
            raise StrategyError("training_step runs in Trainer.fit only")
        share = self.module.trainer.accumulate_grad_batches
        scaler, redirected = getattr(precision, "scaler", None), self._lightning._forward_redirection
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        logs = self._logs(is_training=True)
        outputs: dict[int, Tree] = {}

        def loss_of(place: torch.Tensor) -> Outcome:
            replica, stated = model.replica, list[object]()
            rows = batch[replica]
            with logs.of(replica, rows), precision.train_step_context(), states_to(stated):
                output = redirected(model, self.module, _TRAINING, rows, *others, **named)
            outputs[replica] = output
            if (weight := one_of(stated, "call strategies.torch.loss_weight once in training_step")) is not None:
                if share > 1:
                    raise StrategyError(
                        f"the loss has a weight, but accumulate_grad_batches={share} gives all batches the same one; "
                        "leave it out, and use larger batches or more replicas"
                    )
                logs.weights[replica] = number_of(weight)
            loss = _loss_of(output) / share
            return Outcome(loss if scaler is None else scaler.scale(loss), weight=weight)

        model.steps_made = self.steps_made
        mean = self._averaged(lambda: model.backward(loss_of, torch.arange(len(batch))))
        self.steps_made = model.steps_made
        logs.share(is_whole=True)
        mean = (mean.to(self._lightning.root_device) * share / scale).requires_grad_()
        mean.register_hook(self._give_means)
        first, *_ = outputs.values()
        if not isinstance(first, Mapping):
            return mean
        extras = {name: [one[name] for one in outputs.values()] for name in first if name != "loss"}
        return {"loss": mean, **tree_map_only(torch.Tensor, torch.Tensor.detach, extras)}

    def _averaged(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss of a function whose gradients are kept. Lightning's loop clears older ones afterwards."""
        parameters = list(self.module.parameters())
        before = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        try:
            loss = compute()
            self._means = [one.grad for one in parameters]
        finally:
            for one, gradient in zip(parameters, before, strict=True):
                one.grad = gradient
        return loss

    def _give_means(self, _: torch.Tensor) -> None:
        """Add the gradients of the last `train` to the parameters' gradients. Called by autograd for its loss."""
        with torch.no_grad():
            for one, mean in zip(self.module.parameters(), self._means, strict=True):
                if mean is not None:
                    one.grad = mean if one.grad is None else one.grad.add_(mean)
        self._means = ()

    # ---- evaluations

    def run(
        self,
        method: str,
        context: Callable[[], AbstractContextManager[None]],
        batch: ReplicaBatches,
        others: Sequence[Tree],
        named: Mapping[str, Tree],
    ) -> list[Tree]:
        """Run a method of the module for each local replica with rows, and return the outputs. Collective if it logs.

        Args:
            method: The name of the method.
            context: A context of Lightning's plugin for precision.
            batch: The batches.
            others: The arguments of the method after the batch.
            named: Its arguments by name.

        Raises:
            StrategyError: If the method writes a buffer, which would then be that of some replicas.
        """
        logs, outputs = self._logs(is_training=method == _TRAINING), []
        step, buffers = getattr(self.module, method), _saved_buffers(self.module)
        self._attributes.begin(self._strategy.local_replicas)
        for replica, rows in batch.items():
            draws, attributes = self._drawing(replica, _STEP), self._attributes.of(replica)
            with context(), logs.of(replica, rows), draws, attributes:
                outputs.append(step(rows, *others, **named))
        self._attributes.end()
        written = sorted(name for name, *_ in _saved_buffers(self.module) - buffers)
        if written and self._strategy.num_replicas_in_sync > 1:
            raise StrategyError(
                f"{method} has written the buffer {written[0]}, which would have the rows of some replicas only, also "
                "in checkpoints; log values with self.log, use a metric of torchmetrics, or register the buffer with "
                "persistent=False"
            )
        if self.module.trainer._results is not None:  # predict_step cannot log
            logs.share(batch.is_whole)
        return outputs


def _loss_of(output: Tree) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise StrategyError(
            f"training_step has returned {'no loss' if loss is None else type(loss).__name__}; return a scalar tensor, "
            "or a dictionary with one as 'loss'. A replica cannot skip a step: return a loss multiplied by 0. A "
            "loss has a weight if training_step calls strategies.torch.loss_weight"
        )
    return loss


def _saved_buffers(module: torch.nn.Module) -> set[tuple[str, torch.Tensor, int]]:
    """Return the buffers that a checkpoint has with their names, and how often each was written."""
    return {
        (f"{prefix}.{name}".lstrip("."), one, 0 if one.is_inference() else one._version)
        for prefix, part in module.named_modules()
        for name, one in part._buffers.items()
        if one is not None and name not in part._non_persistent_buffers_set
    }
