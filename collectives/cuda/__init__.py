"""Memory of NVIDIA GPUs, by the CUDA driver alone: nothing is loaded where there is none."""
