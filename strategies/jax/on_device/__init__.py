"""The step that stays on the device: gradients are added there, and the update follows without a word from the host."""
