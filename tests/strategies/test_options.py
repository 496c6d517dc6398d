"""The options of a step: what they may be, and which exclude each other."""

import dataclasses
import re
import typing

import optax
import pytest

import strategies
from strategies import StepOptions, Trainer
from strategies.step.options import TrainerOptions

POSITIONAL = {"seed", "check_numerics", "digest_every"}


def test_a_trainer_takes_every_option():
    """Type checkers know the names and types of what is given by name."""
    fields = {field.name: field.type for field in dataclasses.fields(StepOptions)}
    assert fields.keys() == POSITIONAL | TrainerOptions.__annotations__.keys()
    of_step, of_trainer = typing.get_type_hints(StepOptions), typing.get_type_hints(TrainerOptions)
    assert {name: of_step[name] for name in of_trainer} == of_trainer


def test_every_option_is_described():
    for field in dataclasses.fields(StepOptions):
        assert f"        {field.name}: " in StepOptions.__doc__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"digest_every": -1}, "digest_every is -1; it must be at least 0"),
        ({"gradient_accumulation_count": 0}, "gradient_accumulation_count is 0; it must be at least 1"),
        ({"min_elements_for_sharding": 0}, "min_elements_for_sharding is 0"),
        ({"compute_dtype": "int8"}, "compute_dtype is 'int8'; use None"),
        ({"gradient_transfer_dtype": "float64"}, "gradient_transfer_dtype is 'float64'; gradients travel as"),
        ({"check_numerics": True, "loss_scaling": "dynamic"}, "use one of them"),
        ({"replicated_optimizer_state_sharding": True, "offload_optimizer_state": False}, "must be offloaded"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_out_of_range_or_excluded_is_refused_when_options_are_made(options, words):
    with pytest.raises(ValueError, match=words):
        StepOptions(**options)


def test_an_option_that_is_none_is_named():
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
def test_an_option_of_another_name_is_answered_with_ours(name, way_out):
    with pytest.raises(TypeError, match=re.escape(f"Trainer() got an unexpected keyword argument {name!r}; {way_out}")):
        Trainer(strategies.IPUStrategy(1), lambda variables, batch, key: 0.0, optax.sgd(0.1), **{name: 4})


@pytest.mark.parametrize(
    ("shards", "offloads", "expected"),
    [(False, None, False), (None, None, False), (None, True, True), (True, None, True), (False, True, False)],
)
def test_state_is_sharded_as_it_is_offloaded_unless_it_is_said(shards, offloads, expected):
    options = StepOptions(replicated_optimizer_state_sharding=shards, offload_optimizer_state=offloads)
    assert options.shards_state is expected


def test_options_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepOptions().seed = 1
