"""Options of a step on every engine: their values and exclusions."""

import dataclasses
import importlib.util
import re
import typing

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies import StepOptions, Trainer
from strategies.core.options import CommonOptions, name_of_dtype
from strategies.jax.options import TrainerOptions

POSITIONAL = {"seed", "check_numerics", "digest_every"}
ENGINES = ["jax", *(["torch"] if importlib.util.find_spec("torch") else [])]


@pytest.fixture(params=ENGINES)
def options_class(request):
    """Provide the options class of each installed engine."""
    if request.param == "jax":
        return StepOptions
    return importlib.import_module("strategies.torch.options").TorchOptions


def test_a_trainer_takes_every_option():
    """Type checkers know the names and types of keyword arguments."""
    fields = {field.name: field.type for field in dataclasses.fields(StepOptions)}
    assert fields.keys() == POSITIONAL | TrainerOptions.__annotations__.keys()
    of_step, of_trainer = typing.get_type_hints(StepOptions), typing.get_type_hints(TrainerOptions)
    assert {name: of_step[name] for name in of_trainer} == of_trainer


def test_every_option_is_described_once(options_class):
    descriptions = options_class.__doc__ + CommonOptions.__doc__
    for field in dataclasses.fields(options_class):
        assert descriptions.count(f"\n        {field.name}: ") == 1, field.name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"digest_every": -1}, "digest_every is -1; it must be at least 0"),
        ({"gradient_accumulation_count": 0}, "gradient_accumulation_count is 0; it must be at least 1"),
        ({"min_elements_for_sharding": 0}, "min_elements_for_sharding is 0"),
        ({"reduction_method": "median"}, "Cannot parse 'median'"),
        ({"compute_dtype": "int8"}, "compute_dtype is 'int8'; use"),
        ({"gradient_transfer_dtype": "float64"}, "gradient_transfer_dtype is 'float64'; use one of"),
        ({"loss_scaling": "static"}, "loss_scaling is 'static'"),
        ({"check_numerics": True, "loss_scaling": "dynamic"}, "use one of them"),
        ({"model_state_aggregation": "median"}, "model_state_aggregation has 'median'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_options_are_refused_when_options_are_made(options_class, options, words):
    with pytest.raises(ValueError, match=words):
        options_class(**options)


@pytest.mark.parametrize("name", ["check_numerics", "replicated_optimizer_state_sharding", "map_gradient"])
def test_a_value_of_another_type_is_refused_when_options_are_made(options_class, name):
    with pytest.raises(TypeError, match=f"{name} is 'no'"):
        options_class(**{name: "no"})


@pytest.mark.parametrize("name", ["compute_dtype", "gradient_transfer_dtype"])
def test_dtypes_of_both_frameworks_are_the_same(options_class, name):
    given = ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")]
    if "torch" in ENGINES:
        given.append(importlib.import_module("torch").bfloat16)
    for dtype in given:
        assert options_class(**{name: dtype}).terms == options_class(**{name: "bfloat16"}).terms


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(None, None), (np.float16, "float16"), ("half", "float16"), ("torch.bfloat16", "bfloat16"), ("x y", "x y")],
)
def test_a_dtype_has_one_name(dtype, name):
    assert name_of_dtype(dtype) == name


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, None),
        ({"gradient_transfer_dtype": "bfloat16"}, None),
        ({"replicated_optimizer_state_sharding": True}, "sharded optimizer state"),
    ],
    ids=str,
)
def test_the_part_that_only_one_instance_has_is_named(options_class, options, part):
    assert options_class(**options).unrecoverable_part == part


def test_sharded_state_is_offloaded():
    with pytest.raises(ValueError, match="must be offloaded"):
        StepOptions(replicated_optimizer_state_sharding=True, offload_optimizer_state=False)


def test_an_unknown_option_is_named():
    with pytest.raises(
        TypeError, match=r"^Trainer\(\) got an unexpected keyword argument 'sead'; did you mean seed\?$"
    ):
        Trainer(strategies.IPUStrategy(1), lambda variables, batch, key: 0.0, optax.sgd(0.1), sead=1)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("gradient_accumulation", "did you mean gradient_accumulation_count?"),
        ("accumulate_grad_batches", "did you mean gradient_accumulation_count?"),
        ("loss_scale", "did you mean loss_scaling?"),
        ("xyzzy", "it takes strategy, loss_fn, optimizer, seed, check_numerics, digest_every, gradient_accum"),
    ],
)
def test_an_option_of_the_original_is_answered_with_our_name(name, way_out):
    with pytest.raises(TypeError, match=re.escape(f"Trainer() got an unexpected keyword argument {name!r}; {way_out}")):
        Trainer(strategies.IPUStrategy(1), lambda variables, batch, key: 0.0, optax.sgd(0.1), **{name: 4})


@pytest.mark.parametrize(
    ("shards", "offloads", "expected"),
    [(False, None, False), (None, None, False), (None, True, True), (True, None, True), (False, True, False)],
)
def test_sharding_follows_offloading_by_default(shards, offloads, expected):
    options = StepOptions(replicated_optimizer_state_sharding=shards, offload_optimizer_state=offloads)
    assert options.shards_state is expected


def test_options_are_immutable(options_class):
    with pytest.raises(dataclasses.FrozenInstanceError):
        options_class().seed = 1
