"""Instances on threads whose strategy has the defaults of the engine's row."""

from functools import partial

import pytest


@pytest.fixture
def on_instances(on_instances, request):
    """See there; the row says which exchange the instances use."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return partial(on_instances, defaults=getattr(parameters.get("row"), "defaults", None))
