"""Recomputation of functions that no `Trainer` trains."""

from strategies.programs.recomputation import recomputation_checkpoint, recomputing

__all__ = ["recomputation_checkpoint", "recomputing"]
