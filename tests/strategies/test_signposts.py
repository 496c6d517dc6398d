"""Modules that have moved say where they are."""

import importlib
import importlib.util

import pytest

import strategies


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("strategies.step.trainer", "strategies.trainer"),
        ("strategies.step.gradients", "strategies.gradients.gradient_programs"),
        ("strategies.step.shards", "strategies.replicas.shards"),
        ("strategies.digest", "strategies.comparing.digest"),
        ("strategies.private_folders", "popdist.records.private_files"),
        ("strategies.datasets", "strategies.data.datasets"),
        ("strategies.sharding", "strategies.data.layout"),
        ("strategies.survival", "strategies.replicas.membership"),
    ],
)
def test_what_has_moved_says_where_it_is(old, new):
    with pytest.raises(
        ModuleNotFoundError, match=f"^{old} is {new} now; import what is public from strategies itself$"
    ):
        importlib.import_module(old)
    assert importlib.import_module(new)


def test_what_never_was_is_missing_as_ever():
    with pytest.raises(ModuleNotFoundError, match="^No module named 'strategies.nothing'$"):
        importlib.import_module("strategies.nothing")
    assert importlib.util.find_spec("strategies.step.nothing") is None


def test_public_paths_are_where_they_were():
    for name in ("loops", "cross_replica_ops", "within_replica_ops", "recomputation"):
        assert importlib.import_module(f"strategies.{name}")
    assert strategies.loops.repeat
    assert importlib.import_module("strategies.recomputation").recomputing
