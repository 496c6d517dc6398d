"""Names of options that are given as keywords of a Trainer, and handed on to a dataclass of options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping

_ELSEWHERE = dict.fromkeys(
    (
        *("accumulate_grad_batches", "accumulation", "accumulation_steps", "grad_accumulation"),
        *("gradient_accumulation", "gradient_accumulation_steps"),
    ),
    "gradient_accumulation_count",
)
"""Names that other libraries give to an option."""


def require_known_options(taker: Callable[..., object], given: Iterable[str], options: Mapping[str, object]) -> None:
    """Refuse a keyword that is no option, as a function does, and name the option that is nearest.

    Args:
        taker: the class that the user calls.
        given: the keywords.
        options: all there are besides the parameters of `taker`, by name.

    Raises:
        TypeError: for the first one that is unknown.
    """
    own = [name for name, kind in inspect.signature(taker).parameters.items() if kind.kind is not kind.VAR_KEYWORD]
    known = [*own, *(name for name in options if name not in own)]
    for name in given:
        if name not in known:
            meant = _ELSEWHERE.get(name, "")
            nearest = [meant] if meant in known else difflib.get_close_matches(name, known, 2)
            way_out = f"did you mean {' or '.join(nearest)}?" if nearest else f"it takes {', '.join(known)}"
            raise TypeError(f"{taker.__name__}() got an unexpected keyword argument {name!r}; {way_out}")
