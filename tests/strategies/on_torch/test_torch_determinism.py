"""Deterministic operations of PyTorch."""

import pytest
import torch

from strategies.jax.programs.xla_pitfalls import WAY_OUT
from strategies.torch import tensors
from strategies.torch.tensors import use_deterministic_operations, way_out_of_refusals


@pytest.fixture(autouse=True)
def settings_of_torch():
    """Restore PyTorch's settings after the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, benchmark = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    tensors._warn_of_workspace.cache_clear()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, benchmark


def test_operations_are_deterministic_and_cublas_has_a_fixed_workspace(caplog):
    environ = {}
    torch.backends.cudnn.benchmark = True
    use_deterministic_operations(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert bool(caplog.records) == torch.cuda.is_initialized()  # by an earlier test: too late then


def test_settings_of_the_user_stay(caplog):
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    use_deterministic_operations(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not caplog.records


def test_a_nondeterministic_workspace_is_kept_and_logged_once(caplog):
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
    for _ in range(2):
        use_deterministic_operations(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
    [record] = caplog.records
    assert "CUBLAS_WORKSPACE_CONFIG is ':4096:2'" in record.getMessage()
    assert "set it to :4096:8" in record.getMessage()


def refuse(text):
    with way_out_of_refusals(), way_out_of_refusals():
        raise RuntimeError(text)


def test_the_way_out_is_appended_once_to_the_error_of_pytorch():
    with pytest.raises(RuntimeError) as caught:
        refuse("kthvalue CUDA does not have a deterministic implementation, but you set ...")
    assert caught.value.__notes__ == [WAY_OUT]
    with pytest.raises(RuntimeError) as caught:
        refuse("out of memory")
    assert not hasattr(caught.value, "__notes__")


def test_an_operation_without_a_deterministic_form_is_refused_with_the_way_out():
    use_deterministic_operations({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    with pytest.raises(RuntimeError) as caught, way_out_of_refusals():
        torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2))
    assert WAY_OUT in caught.value.__notes__
