"""The one place that says how to get PyTorch; imported before everything that needs it."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "strategies.torch needs PyTorch, which is not installed; pip install 'popdist-everywhere[torch]' installs it, "
        "and docs/torch.md says how to get it without CUDA",
        name="torch",
    ) from None
