"""Fixtures that run models of Keras on threads; without Keras these tests are not collected."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("keras") else ["test_*.py"]


@pytest.fixture
def in_scopes(on_instances):
    """Provide a function that runs `program(strategy)` in the scope of a strategy on n instances, in order."""

    def run(instances, program, replicas=4, **options):
        def in_scope(strategy):
            with strategy.scope():
                return program(strategy)

        return on_instances(instances, replicas, in_scope, **options)

    return run


@pytest.fixture
def alone(in_scopes):
    """Provide a function that runs `program(strategy)` in the scope of a strategy on one instance."""

    def run(program, replicas=4, **options):
        [result] = in_scopes(1, program, replicas, **options)
        return result

    return run


def pytest_collection_modifyitems(items):
    """Ignore warnings of NumPy and JAX about Keras's own code."""
    for item in items:
        if "keras_models" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"))
