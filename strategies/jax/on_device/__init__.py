"""The step that stays on the device: it adds gradients and updates variables there, without waiting for the host."""
