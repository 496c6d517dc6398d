"""Norms and distributions of weights and mean gradients: a conformance test of all engines."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from engine_rows import EVERY, REPLICAS, STEPS, batches, variables
from tiers import first_of, only

from popdist.records.distribution_settings import DistributionSettings
from strategies.loss_scaling import LossScaling

COUNTS = (1, 2, 3)
OF_TORCH = {"w": "weight", "b": "bias"}
SHARDED = {"replicated_optimizer_state_sharding": True}
CHANGING = (
    {},
    SHARDED,
    {"gradient_transfer_dtype": "bfloat16"},
    {"loss_scaling": LossScaling(2.0**10, 2.0, 2)},
)


def seen(strategy, row, settings=DistributionSettings(1, 2), **options):  # noqa: B008  # frozen
    """Train, and return the norms and the distributions of each step that was looked at, as bits."""
    strategy.replicas.looks = settings
    found = []
    with row.training(strategy, **options) as training:
        for batch in batches(strategy):
            training.step(batch)
            last = training.loop._seen
            if last is not None and last.step == training.state.step:
                distributions = {
                    name: (each.counts.tolist(), each.edges.tobytes(), *each.numbers.values())
                    for name, each in last.distributions.items()
                }
                found.append((last.step, last.read(0), distributions))
    return found


@pytest.mark.parametrize("options", only([SHARDED], CHANGING), ids=lambda options: "-".join(options) or "plain")
@EVERY
def test_norms_and_distributions_have_the_same_bits_for_every_number_of_instances(row, options, on_instances):
    if options.get("gradient_transfer_dtype", row.transfers[0]) not in row.transfers:
        pytest.skip(f"this engine exchanges nothing as {options['gradient_transfer_dtype']}")
    function = functools.partial(seen, row=row, **options)
    mechanisms = {1: "auto", 2: "ring", 3: "window"}
    found = [each for count in COUNTS for each in on_instances(count, REPLICAS, function, mechanisms[count])]
    assert found == found[:1] * sum(COUNTS)
    steps, _, distributions = zip(*found[0], strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    assert [bool(each) for each in distributions] == [True, False] * (STEPS // 2) + [True] * (STEPS % 2)


@pytest.mark.parametrize("options", first_of(CHANGING), ids=lambda options: "-".join(options) or "plain")
@EVERY
def test_values_are_those_of_the_weights_before_the_step_and_of_the_mean_gradient(row, options, on_instances):
    if options.get("gradient_transfer_dtype", row.transfers[0]) not in row.transfers:
        pytest.skip(f"this engine exchanges nothing as {options['gradient_transfer_dtype']}")

    def function(strategy):
        return seen(strategy, row, **options)[0], {
            name: np.array(each) for name, each in next(batches(strategy)).items()
        }

    [((_, norms, distributions), batch)] = on_instances(1, REPLICAS, function)
    weights = variables()
    error = batch["x"] @ weights["w"] + weights["b"] - batch["y"]
    to_outputs = 2 * error / error.size
    gradients = {"w": batch["x"].T @ to_outputs, "b": to_outputs.sum(axis=0)}
    tolerance = 0.02 if "gradient_transfer_dtype" in options else 1e-5
    for kind, of_all, close in (("weight", weights, 1e-6), ("gradient", gradients, tolerance)):
        for name, array in of_all.items():
            own = OF_TORCH[name] if f"{kind}_norm/{name}" not in norms else name
            assert norms[f"{kind}_norm/{own}"] == pytest.approx(np.linalg.norm(array), rel=close)
            counts, _, least, *_, most, _, _, _ = distributions[f"{kind}s/{own}"]
            assert sum(counts) == array.size
            assert [least, most] == pytest.approx([array.min(), array.max()], abs=close * float(np.abs(array).max()))
        whole = np.sqrt(sum(np.square(array).sum() for array in of_all.values()))
        assert norms[f"{kind}_norm"] == pytest.approx(whole, rel=close)
    assert len(norms) == 6


@pytest.mark.complete
@EVERY
def test_nothing_is_looked_at_where_nothing_is_due(row, on_instances):
    function = functools.partial(seen, row=row, settings=DistributionSettings(0, 3))
    [found] = on_instances(1, REPLICAS, function)
    assert [(step, norms) for step, norms, _ in found] == [(step, {}) for step in range(1, STEPS + 1, 3)]
    assert all(distributions for _, _, distributions in found)
