"""PyTorch's exchange of gradients that lie on a device."""
