"""Code of `torch.jit`: the same bits in every call, whatever was called before."""

from __future__ import annotations

import re

import torch

from strategies.errors import StrategyError

_OPTIMIZED = re.compile(r"prim::(DifferentiableGraph|\w*Group)")


def stop_profiling(module: torch.nn.Module) -> None:
    """Turn PyTorch's profiling executor off in this process, for all scripted and traced code.

    The executor computes other bits from the second call on. A program calls such code unequally often in different
    processes, for example if only instance 0 evaluates.

    Raises:
        StrategyError: If the executor has already optimized a part of the module.
    """
    torch._C._jit_set_profiling_mode(False)  # there is no public switch for all threads
    optimized = [name for name, one in module.named_modules() if _is_optimized(one)]
    if optimized:
        raise StrategyError(
            f"{optimized[0] or 'the module'} is scripted and was called before, or another module with the same code "
            "was, so PyTorch has optimized it, and its bits depend on the number of calls; make the Trainer or "
            "DistributedModel before the first call, or call the module inside torch.jit.optimized_execution(False)"
        )


def _is_optimized(module: torch.nn.Module) -> bool:
    """Return whether a module has code of the executor with other bits: own derivatives, or fused operations."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    try:
        plans = module._c.get_debug_state().execution_plans
    except RuntimeError:  # "optimized_plan_ INTERNAL ASSERT FAILED": there is none
        return False
    return any(_OPTIMIZED.search(str(plan.graph)) for plan in plans.values())
