"""Modules that `torch.compile` has wrapped, and their copies, which share one compilation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._dynamo import eval_frame

from strategies.errors import StrategyError

IN_PLACE = "_compiled_call_impl"
"""The attribute in which `module.compile()` keeps what runs in place of the module; copies of modules lack it."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` has wrapped a module or a part of it, in place or not."""
    return any(_context_around(one) is not None or is_compiled_in_place(one) for one in module.modules())


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return getattr(module, IN_PLACE, None) is not None


def kept_contexts(module: torch.nn.Module) -> dict[int, object]:
    """Return a memo by which `copy.deepcopy` keeps contexts of compilations, whose identity finds the compilation."""
    contexts = [_context_around(one) for one in module.modules()]
    return {id(context): context for context in contexts if context is not None}


def compile_like(copied: torch.nn.Module, original: torch.nn.Module) -> None:
    """Compile a copy in place as the original is, with the same compilation; or not, as the original is not.

    Raises:
        StrategyError: if this version of PyTorch does not show how.
    """
    if not is_compiled_in_place(original):
        setattr(copied, IN_PLACE, None)
        return
    wrapper = getattr(original, IN_PLACE)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    closed = dict(zip(names, getattr(wrapper, "__closure__", None) or (), strict=True))
    if "self" not in closed:
        raise StrategyError(
            f"{type(original).__qualname__} was compiled by module.compile(), and this version of PyTorch does not "
            "show how; give strategies.torch the module that torch.compile(module) returns"
        )
    context: Callable[[object], object] = closed["self"].cell_contents
    setattr(copied, IN_PLACE, context(copied._call_impl))


def refuse_to_be_compiled() -> None:
    """Refuse a function that torch.compile runs: it would compile the exchange of gradients as well."""
    if callable(eval_frame.get_eval_frame_callback()):
        raise StrategyError(
            "torch.compile around a DistributedModel would compile the exchange of gradients as well; compile the "
            "module that it has: DistributedModel(torch.compile(module), strategy)"
        )


def _context_around(module: torch.nn.Module) -> object:
    return vars(module).get("dynamo_ctx")
