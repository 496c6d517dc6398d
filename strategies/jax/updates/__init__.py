"""The update of variables by mean gradients, with whole or sharded optimizer state."""
