"""Instances on threads whose strategy has the defaults of the engine's row."""

from functools import partial

import pytest


@pytest.fixture
def on_instances(on_instances, request):
    """Provide `on_instances` with the exchange of the engine's row."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return partial(on_instances, defaults=getattr(parameters.get("row"), "defaults", None))
