"""The one place that says how to get PyTorch; imported before everything that needs it."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "strategies.torch needs PyTorch, which is not installed; run pip install '.[torch]' in the project's folder, "
        "or see docs/torch.md for PyTorch without CUDA",
        name="torch",
    ) from None
