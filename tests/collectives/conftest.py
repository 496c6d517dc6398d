"""The native kernel, and NumPy in its place, for tests of what both do; and two hosts whose cable can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from cut_networks import two_hosts

from collectives.kernel import NATIVE, Kernel, kernel


@pytest.fixture
def native() -> Kernel:
    """Return the native kernel; skip the test without it."""
    found = kernel()
    if found is None:
        pytest.skip("the native kernel was not built, or POPDIST_NATIVE turns it off")
    return found


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the native kernel off for communicators and reductions that the test makes."""
    monkeypatch.setenv(NATIVE, "0")
    kernel.cache_clear()
    assert kernel() is None
    yield
    kernel.cache_clear()


@pytest.fixture(params=["native", "numpy"])
def with_either(request: pytest.FixtureRequest) -> None:
    """Run the test with the native kernel, and once more without it."""
    request.getfixturevalue("native" if request.param == "native" else "without_kernel")


@pytest.fixture
def hosts() -> Iterator[Sequence[str]]:
    """Provide the names of two network namespaces with a cable between them."""
    with two_hosts() as names:
        yield names
