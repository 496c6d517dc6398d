"""Idioms of PopTorch programs: each has the result of plain PyTorch and the same bits on all instances, or is refused.

A new idiom is a row of `IDIOMS`.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from poptorch_modules import (
    Asking,
    Cast,
    Cube,
    Frozen,
    Halves,
    Net,
    Numbered,
    PlainAdamW,
    Scopes,
    Started,
    Tied,
    Words,
    begun,
    computing,
    data,
    net,
    plain_lamb,
    unmarked,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import strategies.torch.poptorch as poptorch
from strategies import StrategyError
from strategies.torch import seed_of

CALLS, ROWS = 3, 2
All, EveryN, Final, Sum = (getattr(poptorch.OutputMode, name) for name in ("All", "EveryN", "Final", "Sum"))
SGD = torch.optim.SGD


def nothing(*_: Any) -> None:
    """Do nothing; most idioms have no code around their steps."""


@dataclass(frozen=True)
class Idiom:
    """A training program beside its equivalent in plain PyTorch.

    Attributes:
        model: Makes the model after the seed is set.
        options: Sets the options.
        own: Makes the optimizer of the program.
        plain: Makes the optimizer of plain PyTorch.
        after: (executor, call) -> None: the code of the program after each call.
        plain_after: (optimizer, call) -> None: the equivalent code in plain PyTorch.
        before_step: (module) -> None: changes of gradients in plain PyTorch.
        weight: Weight of the loss in plain PyTorch.
        tolerance: Tolerance of the comparison; 0 for the same bits.
        same_dtypes: Whether outputs have the dtypes of plain PyTorch.
        refused: The text of the error; None if the idiom runs.
    """

    model: Callable[[], nn.Module] = Net
    options: Callable[[poptorch.Options], object] = nothing
    own: Callable[[Any], torch.optim.Optimizer] = lambda p: poptorch.optim.SGD(p, lr=0.1)
    plain: Callable[[Any], torch.optim.Optimizer] = lambda p: SGD(p, lr=0.1)
    after: Callable[[poptorch.PoplarExecutor, int], object] = nothing
    plain_after: Callable[[torch.optim.Optimizer, int], object] = nothing
    before_step: Callable[[nn.Module], object] = nothing
    weight: float = 1
    tolerance: float = 0
    same_dtypes: bool = True
    refused: str | None = None


# ---- options of the table's rows


def accumulate(count):
    return lambda options: options.Training.gradientAccumulation(count)


def by(method, *arguments):
    """Set an option, with dots for groups, and accumulate over four micro-batches, as pipelines need."""

    def set_option(options):
        options.Training.gradientAccumulation(4)
        *groups, name = method.split(".")
        owner = options
        for group in groups:
            owner = getattr(owner, group)
        getattr(owner, name)(*arguments)

    return set_option


def located(**settings):
    location = poptorch.TensorLocationSettings()
    for name, value in settings.items():
        getattr(location, name)(value)
    return lambda options: options.TensorLocations.setOptimizerLocation(location)


def sharded(options):
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
    options.TensorLocations.setOptimizerLocation(location.minElementsForReplicatedTensorSharding(2))


def marked(reduction, *, times=1.0):
    unreduced = {"mean": "none", "sum": "none", "none": "mean"}[reduction]
    return lambda output, labels: poptorch.identity_loss(
        F.cross_entropy(output, labels, reduction=unreduced) * times, reduction
    )


def two_marks(output, labels):
    first = poptorch.identity_loss(F.cross_entropy(output, labels), "none")
    second = poptorch.identity_loss(output.square(), "mean")
    return poptorch.identity_loss(first + second, "none")


def in_groups(kind, **numbers):
    def make(parameters):
        first, *others = list(parameters)
        return kind([{"params": [first], "lr": 0.3, "weight_decay": 0.1}, {"params": others}], lr=0.1, **numbers)

    return make


def rate_of(call):
    return 0.1 / (call + 2)


def set_rate(optimizer, call):
    optimizer.param_groups[0]["lr"] = rate_of(call)


def replace_optimizer(executor, call):
    executor.setOptimizer(poptorch.optim.SGD(executor.parameters(), lr=rate_of(call)))


def rescale(executor, call):
    optimizer = executor.trainer.optimizer
    optimizer.loss_scaling = 2.0 ** (call + 3)
    executor.setOptimizer(optimizer)


def clip(limit):
    return lambda module: nn.utils.clip_grad_norm_(module.parameters(), limit)


def validate(executor, call):
    options = executor.options.clone().deviceIterations(1)
    options.Training.gradientAccumulation(1)
    inference = poptorch.inferenceModel(executor, options)
    local = len(options.strategy.replicas.local_replicas)
    rows = data(4 * local)[0]
    found = inference(rows)
    model = executor.model.eval()
    of_each = [model(part).detach() for part in rows.split(4)]  # a product of more rows may have other bits
    assert torch.equal(found, torch.cat(of_each))
    executor.train()
    inference.destroy()


def resume(executor, call):
    file = io.BytesIO()
    optimizer = executor.trainer.optimizer
    torch.save({"model": executor.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    executor.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def look(executor, call):
    executor.copyWeightsToHost()
    assert executor.isCompiled()
    assert executor.isAttachedToDevice()
    executor.detachFromDevice()
    executor.attachToDevice()
    executor.copyWeightsToDevice()


def halve_last(executor_or_optimizer, call):
    groups = (
        getattr(executor_or_optimizer, "param_groups", None) or executor_or_optimizer.trainer.optimizer.param_groups
    )
    with torch.no_grad():
        groups[-1]["params"][-1].mul_(0.5)


def wide(step_of):
    """Return a plain optimizer of float32 copies of 16-bit parameters, with float32 states as in PopTorch."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.copies = [nn.Parameter(p.detach().float()) for p in self.param_groups[0]["params"]]
            self.inner = step_of(self.copies)

        @torch.no_grad()
        def step(self):
            for p, own in zip(self.param_groups[0]["params"], self.copies, strict=True):
                own.copy_(p)
                own.grad = p.grad.float()
            self.inner.step()
            for p, own in zip(self.param_groups[0]["params"], self.copies, strict=True):
                p.copy_(own)

    return Wide


def first_elements(x):
    return poptorch.dynamic_slice(x, 1, torch.tensor([0]), 8, 1)


two_stages = poptorch.PipelinedExecution("B1", "B2")
on_two = poptorch.PipelinedExecution(poptorch.Stage("B1").ipu(0), poptorch.Stage("B2").ipu(1))
increment = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
mean_of_losses = poptorch.MeanReductionStrategy

IDIOMS: dict[str, Idiom] = {
    # options of a call
    "defaults": Idiom(),
    "default_optimizer": Idiom(own=lambda p: None, plain=lambda p: SGD(p, lr=0.01)),
    "device_iterations": Idiom(options=lambda o: o.deviceIterations(3)),
    "gradient_accumulation": Idiom(options=accumulate(4)),
    "chain": Idiom(options=lambda o: o.deviceIterations(2).outputMode(All).Training.gradientAccumulation(2)),
    "output_every": Idiom(options=lambda o: o.deviceIterations(4).outputMode(EveryN, 2)),
    "output_final": Idiom(options=lambda o: o.deviceIterations(2).outputMode(Final)),
    "output_sum": Idiom(options=lambda o: o.deviceIterations(3).outputMode(Sum), tolerance=1e-6),
    "anchor_mode": Idiom(options=lambda o: o.deviceIterations(2).anchorMode(poptorch.AnchorMode.All)),
    "sum_of_gradients": Idiom(
        options=by("Training.accumulationAndReplicationReductionType", poptorch.ReductionType.Sum), weight=4
    ),
    "running_mean": Idiom(
        options=by("Training.setMeanAccumulationAndReplicationReductionStrategy", mean_of_losses.Running),
        tolerance=1e-6,
    ),
    "seed": Idiom(options=lambda o: o.randomSeed(7), model=net(lambda: nn.Dropout(0.5))),
    "dropout_accumulated": Idiom(options=accumulate(3), model=net(lambda: nn.Dropout(0.5))),
    "no_reduction": Idiom(
        options=by("Training.accumulationAndReplicationReductionType", poptorch.ReductionType.NoReduction),
        refused=r"ReductionType\.Sum or \.Mean",
    ),
    "floating_point_exceptions": Idiom(options=by("Precision.enableFloatingPointExceptions", True)),
    "stochastic_rounding": Idiom(options=by("Precision.enableStochasticRounding", True)),
    "partials": Idiom(options=by("Precision.setPartialsType", torch.float16)),
    "float_downcast": Idiom(
        options=by("Precision.halfFloatCasting", poptorch.HalfFloatCastingBehavior.FloatDowncastToHalf),
        refused="would do the opposite",
    ),
    "same_rows_for_a_group": Idiom(
        options=by("inputReplicaGrouping", 2, poptorch.CommGroupType.Consecutive), refused="get the same rows"
    ),
    "process_by_hand": Idiom(options=by("Distributed.configureProcessId", 1, 2), refused=r"popdist\.poptorch\.Options"),
    # optimizers
    "sgd_all": Idiom(
        own=lambda p: poptorch.optim.SGD(p, 0.1, 0.9, 0.2, 0.01, loss_scaling=8.0),
        plain=lambda p: SGD(p, 0.1, 0.9, 0.2, 0.01),
    ),
    "sgd_nesterov": Idiom(
        own=lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        plain=lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "sgd_combined": Idiom(
        own=lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=128.0),
        plain=lambda p: SGD(p, lr=0.1, momentum=0.9),
        options=accumulate(2),
    ),
    "sgd_velocities_in_halves": Idiom(
        own=lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, velocity_accum_type=torch.float16),
        plain=lambda p: SGD(p, lr=0.1, momentum=0.9),
        tolerance=1e-3,
    ),
    "sgd_clipped": Idiom(
        own=lambda p: poptorch.optim.SGD(p, lr=0.1, max_grad_norm=0.01), before_step=clip(0.01), options=accumulate(2)
    ),
    "sgd_of_pytorch": Idiom(own=lambda p: SGD(p, lr=0.1)),
    "adam": Idiom(own=lambda p: poptorch.optim.Adam(p), plain=lambda p: torch.optim.Adam(p)),
    "adam_decay": Idiom(
        own=lambda p: poptorch.optim.Adam(
            p, lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1, accum_type=torch.float16
        ),
        plain=lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1),
    ),
    "adamw_types": Idiom(
        own=lambda p: poptorch.optim.AdamW(
            p, lr=0.1, accum_type=torch.float32, second_order_momentum_accum_type=torch.float32
        ),
        plain=lambda p: torch.optim.AdamW(p, lr=0.1),
    ),
    "adamw_uncorrected": Idiom(
        own=lambda p: poptorch.optim.AdamW(p, lr=0.05, eps=1e-6, bias_correction=False),
        plain=PlainAdamW,
        tolerance=1e-5,
    ),
    "rmsprop": Idiom(
        own=lambda p: poptorch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5, centered=True),
        plain=lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5, centered=True),
    ),
    "lamb": Idiom(
        own=lambda p: poptorch.optim.LAMB(p, lr=0.05, eps=1e-6, max_weight_norm=2.0), plain=plain_lamb(), tolerance=1e-5
    ),
    "lamb_uncorrected": Idiom(
        own=lambda p: poptorch.optim.LAMB(p, lr=0.05, eps=1e-6, max_weight_norm=2.0, bias_correction=False),
        plain=plain_lamb(False),
        tolerance=1e-5,
    ),
    "groups": Idiom(own=in_groups(poptorch.optim.AdamW), plain=in_groups(torch.optim.AdamW)),
    "rate_in_place": Idiom(after=lambda e, call: set_rate(e.trainer.optimizer, call), plain_after=set_rate),
    "rate_by_another_optimizer": Idiom(after=replace_optimizer, plain_after=set_rate),
    "loss_scaling_by_set_optimizer": Idiom(after=rescale, options=accumulate(2)),
    "automatic_loss_scaling": Idiom(options=by("Training.setAutomaticLossScaling", True)),
    "sharded_state": Idiom(
        options=sharded,
        own=lambda p: poptorch.optim.AdamW(p, lr=0.1),
        plain=lambda p: torch.optim.AdamW(p, lr=0.1),
    ),
    "sharded_lamb": Idiom(
        options=sharded,
        own=lambda p: poptorch.optim.LAMB(p, lr=0.05, eps=1e-6, max_weight_norm=2.0),
        plain=plain_lamb(),
        tolerance=1e-5,
    ),
    "state_off_chip": Idiom(options=located(useOnChipStorage=False)),
    # losses
    "loss_marked_mean": Idiom(net(loss=marked("mean"))),
    "loss_marked_sum": Idiom(net(loss=marked("sum", times=0.3))),
    "loss_marked_none": Idiom(net(loss=marked("none"))),
    "loss_of_marked_losses": Idiom(net(loss=two_marks)),
    "loss_first": Idiom(net(loss=marked("none"), returned=lambda output, loss: (loss, output))),
    "loss_unmarked_first": Idiom(net(returned=lambda output, loss: (loss, output))),
    "loss_alone": Idiom(net(returned=lambda output, loss: loss)),
    "loss_in_dictionary": Idiom(net(returned=lambda output, loss: {"logits": output, "loss": loss})),
    "loss_and_metric": Idiom(net(returned=lambda output, loss: (loss, output.detach().max()))),
    "losses_two_marks_apart": Idiom(
        net(loss=lambda o, y: (marked("none")(o, y), poptorch.identity_loss(o.square(), "mean"))),
        refused="2 losses are marked; add them up",
    ),
    "losses_two_unmarked": Idiom(
        net(returned=lambda output, loss: (loss, loss.exp())),
        refused=r"returns 2 scalars .* any could be the loss; mark",
    ),
    "loss_of_each_row": Idiom(
        net(loss=lambda o, y: poptorch.identity_loss(F.cross_entropy(o, y, reduction="none"), "none")),
        refused="scalar",
    ),
    # blocks
    "blocks_with_devices": Idiom(lambda: Scopes((0, 1)), accumulate(4)),
    "blocks_begun": Idiom(begun, accumulate(4)),
    "blocks_started": Idiom(Started, accumulate(4)),
    "blocks_removed": Idiom(unmarked, accumulate(4)),
    "pipeline": Idiom(Scopes, by("setExecutionStrategy", two_stages)),
    "pipeline_of_stages": Idiom(Scopes, by("setExecutionStrategy", on_two)),
    "pipeline_incremented": Idiom(Numbered, by("setExecutionStrategy", increment)),
    "pipeline_sharded": Idiom(Scopes, by("setExecutionStrategy", poptorch.ShardedExecution("B1", "B2"))),
    "pipeline_phased": Idiom(Scopes, by("setExecutionStrategy", poptorch.SerialPhasedExecution(["B1"], ["B2"]))),
    "pipeline_too_short": Idiom(Scopes, lambda o: o.setExecutionStrategy(two_stages), refused="micro-batches"),
    # ---- parts of models
    "frozen_layer": Idiom(Frozen),
    "tied_weights": Idiom(Tied, accumulate(2)),
    "batch_norm": Idiom(net(lambda: nn.BatchNorm1d(8)), accumulate(2)),
    "layer_norm": Idiom(net(lambda: nn.LayerNorm(8))),
    "table_of_words": Idiom(Words),
    "halves": Idiom(
        Halves,
        own=lambda p: poptorch.optim.Adam(p, lr=0.01, loss_scaling=128.0),
        plain=wide(lambda p: torch.optim.Adam(p, lr=0.01)),
        tolerance=2e-3,
    ),
    "halves_sharded": Idiom(
        Halves,
        sharded,
        own=lambda p: poptorch.optim.AdamW(p, lr=0.01, first_order_momentum_accum_type=torch.float16),
        plain=wide(lambda p: torch.optim.AdamW(p, lr=0.01)),
        tolerance=2e-3,
    ),
    "autocast": Idiom(Cast),
    "autocast_off": Idiom(Cast, by("Precision.autocastEnabled", False), tolerance=2e-2, same_dtypes=False),
    "asks_where_it_runs": Idiom(Asking, weight=2),
    "own_operator": Idiom(computing(Cube.apply)),
    "recomputed": Idiom(computing(lambda x: checkpoint(torch.sin, x, use_reentrant=False))),
    "marked_recomputation": Idiom(computing(poptorch.recomputationCheckpoint)),
    "on_the_host": Idiom(computing(lambda x: poptorch.CPU(torch.sin, "host")(x))),
    "loop": Idiom(computing(lambda x: poptorch.for_loop(3, torch.sin, [x])[0])),
    "choice": Idiom(computing(lambda x: poptorch.cond(x.sum() > 0, torch.sin, [x], torch.cos, [x]))),
    "slices": Idiom(computing(first_elements)),
    "products_in_parts": Idiom(
        computing(
            lambda x: poptorch.serializedMatMul(x, torch.eye(8), poptorch.MatMulSerializationMode.ReducingDim, factor=2)
        )
    ),
    "operators_without_effect": Idiom(computing(lambda x: poptorch.nop(poptorch.set_available_memory(x, 0.2)))),
    "custom_codelet": Idiom(
        computing(lambda x: poptorch.custom_op([x], "Cube", "domain", 1)), refused="autograd.Function"
    ),
    # ---- actions of programs between calls
    "looks_at_weights": Idiom(after=look),
    "destroys_and_goes_on": Idiom(after=lambda e, _: e.destroy()),
    "validates": Idiom(after=validate),
    "saves_and_resumes": Idiom(
        own=lambda p: poptorch.optim.AdamW(p, lr=0.1), plain=lambda p: torch.optim.AdamW(p, lr=0.1), after=resume
    ),
    "changes_weights": Idiom(after=halve_last, plain_after=halve_last),
    "keeps_its_mode": Idiom(net(lambda: nn.Dropout(0.5)), after=lambda e, _: e.model.eval()),
    "mode_of_evaluation": Idiom(
        net(lambda: nn.Dropout(0.5)), after=lambda e, _: e.eval(), plain_after=lambda o, _: o.modules[0].eval()
    ),
}


def rows_of(options, calls=CALLS, local=slice(None), replicas=1):
    """Yield the batches of the calls in the order of a `DataLoader`: micro-batches, each with the local replicas."""
    count = options.device_iterations * options.Training.gradient_accumulation
    x, labels = data(calls * count * replicas * ROWS)
    for call in range(calls):
        place = slice(call * count * replicas * ROWS, (call + 1) * count * replicas * ROWS)
        cut = [
            each[place].reshape(count, replicas, ROWS, *each.shape[1:])[:, local].flatten(0, 2) for each in (x, labels)
        ]
        yield tuple(cut)


def options_of(idiom, replicas, strategy=None):
    options = poptorch.Options().replicationFactor(replicas)
    if strategy is not None:
        options._strategy = strategy
    idiom.options(options)
    return options


def trained(idiom, module, replicas, strategy=None):
    """Return the outputs of all calls, and the module's state after them."""
    options = options_of(idiom, replicas, strategy)
    training = poptorch.trainingModel(module, options, idiom.own(module.parameters()))
    local = options.strategy.replicas.local_replicas
    found = []
    try:
        for call, batch in enumerate(rows_of(options, local=slice(local.start, local.stop), replicas=replicas)):
            found.append(training(*batch))
            idiom.after(training, call)
    finally:
        training.destroy()
    return found, module.state_dict()


def plainly(idiom, module):
    """Return the outputs and the state by plain PyTorch on one replica."""
    options = options_of(idiom, 1)
    optimizer = idiom.plain(module.parameters())
    optimizer.modules = [module]
    count, updates, found = options.Training.gradient_accumulation, 0, []
    for call, batch in enumerate(rows_of(options)):
        of_call = []
        for x, labels in _pairs(batch, options.device_iterations):
            optimizer.zero_grad()
            for number, (part, of_part) in enumerate(_pairs((x, labels), count)):
                torch.manual_seed(seed_of(options.seed, 0, updates, number))
                outputs = module(part, of_part)
                (_loss(outputs) * idiom.weight / count).backward()
                of_call.append(_detached(outputs))
            idiom.before_step(module)
            optimizer.step()
            updates += 1
        found.append(returned(of_call, options))
        idiom.plain_after(optimizer, call)
    return found, module.state_dict()


def _pairs(batch, count):
    return zip(*(each.chunk(count) for each in batch), strict=True)


def _loss(outputs):
    return next(leaf for leaf in leaves(outputs) if not leaf.ndim and leaf.requires_grad)


def _detached(outputs):
    return [each.detach() for each in leaves(outputs)]


def returned(of_call, options):
    """Return the selected outputs of all micro-batches, as PopTorch's documentation specifies."""
    mode = options.output_mode
    if mode is Sum:
        return [torch.stack(each).sum(0) for each in zip(*of_call, strict=True)]
    picked = {All: of_call, EveryN: of_call[options.output_every - 1 :: options.output_every]}.get(mode, of_call[-1:])
    joined = [torch.cat(each) if each[0].ndim else torch.stack(each) for each in zip(*picked, strict=True)]
    return [each[0] if len(picked) == 1 and not picked[0][number].ndim else each for number, each in enumerate(joined)]


def leaves(outputs):
    if isinstance(outputs, dict):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def made(idiom):
    torch.manual_seed(2)
    return idiom.model()


def bits_of(module):
    return b"".join(each.reshape(-1).view(torch.uint8).numpy().tobytes() for each in module.state_dict().values())


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_has_the_result_of_plain_pytorch(name):
    idiom = IDIOMS[name]
    if idiom.refused:
        with pytest.raises((StrategyError, TypeError, ValueError), match=idiom.refused):
            trained(idiom, made(idiom), 1)
        return
    module = made(idiom)
    expected, of_plain = plainly(idiom, copy.deepcopy(module))
    found, state = trained(idiom, module, 1)
    for own, plain in zip([*found, list(state.values())], [*expected, list(of_plain.values())], strict=True):
        for one, other in zip(leaves(own), plain, strict=True):
            torch.testing.assert_close(
                one, other, rtol=idiom.tolerance, atol=idiom.tolerance, check_dtype=idiom.same_dtypes
            )


@pytest.mark.parametrize("name", [name for name, idiom in IDIOMS.items() if not idiom.refused])
def test_idiom_has_the_same_bits_on_two_instances(name, on_instances):
    idiom = IDIOMS[name]
    module = made(idiom)

    def train(strategy):
        own = copy.deepcopy(module)
        trained(idiom, own, 4, strategy)
        return bits_of(own)

    [alone] = on_instances(1, 4, train)
    assert on_instances(2, 4, train) == [alone] * 2
    assert alone != bits_of(module)
