"""The exchange of PyTorch's gradients: their plan, their means on the host or a device, and the paths between."""
