"""Memory of NVIDIA GPUs, accessed through the CUDA driver alone, and only if a driver is installed."""
