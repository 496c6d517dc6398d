"""Environment variables for limits, mechanism and network."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives import Limits
from collectives.plans.network import Network
from popdist.errors import EnvironmentMismatchError
from popdist.tuning import read_limits, read_mechanism, read_network


def test_without_variables_the_defaults_hold():
    assert read_limits({}) == Limits()
    assert read_mechanism({}) == "auto"
    assert read_network({}) is None


def test_limits_are_in_seconds():
    environ = {"POPDIST_STALL_WARNING_S": "2", "POPDIST_TIMEOUT_S": "2.5", "POPDIST_CONNECT_TIMEOUT_S": "1e3"}
    assert read_limits(environ) == Limits(stall_warning_s=2.0, timeout_s=2.5, connect_timeout_s=1000.0)


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "nan"])
def test_an_invalid_limit_is_refused(text):
    with pytest.raises(EnvironmentMismatchError, match=f"POPDIST_TIMEOUT_S='{text}' is not a positive number"):
        read_limits({"POPDIST_TIMEOUT_S": text})


@pytest.mark.parametrize("mechanism", ["auto", "window", "ring"])
def test_the_mechanism_is_read(mechanism):
    assert read_mechanism({"POPDIST_MECHANISM": mechanism}) == mechanism


@pytest.mark.parametrize("text", ["", "tree", "Ring"])
def test_an_unknown_mechanism_is_refused(text):
    with pytest.raises(EnvironmentMismatchError, match=f"POPDIST_MECHANISM='{text}' is not a mechanism; use"):
        read_mechanism({"POPDIST_MECHANISM": text})


def test_costs_are_read_from_the_named_file(tmp_path: Path):
    network = Network(latency_s=1e-3, bytes_per_s=25e6)
    network.write(tmp_path / "net.json")
    assert read_network({"POPDIST_NETWORK": str(tmp_path / "net.json")}) == network


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("[]", "not describe a network"), ('{"speed": 1}', "unknown keys speed")]
)
def test_a_file_without_costs_is_refused(tmp_path: Path, text, why):
    path = tmp_path / "net.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EnvironmentMismatchError, match=f"POPDIST_NETWORK='.*{why}.*measure"):
        read_network({"POPDIST_NETWORK": str(path)})
