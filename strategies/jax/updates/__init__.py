"""New variables of mean gradients, with whole or sharded optimizer state."""
