"""The dtype in which gradients travel between replicas: their own, a 16-bit float, or int8 with error feedback.

16-bit floats are cast inside the program that computes the gradients. They are reduced in the order of the tree with
float32 accumulators. `int8.py` has the encoding of int8. In both cases the bits do not depend on the number of
instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_INT8 = np.dtype(np.int8)
_NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": _INT8}


@dataclass(frozen=True)
class GradientTransfer:
    """The dtype in which gradients travel.

    Attributes:
        dtype: float16, bfloat16 or int8. None: each gradient travels in its own dtype.
    """

    dtype: np.dtype | None = None

    @classmethod
    def parse(cls, dtype: Any) -> GradientTransfer:
        """Return the transfer that the option `gradient_transfer_dtype` names.

        Args:
            dtype: None, "float16", "bfloat16", "int8", or one of these dtypes of NumPy or JAX.

        Raises:
            ValueError: `dtype` is anything else.
        """
        if dtype is None:
            return cls()
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
        if name not in _NARROW:
            raise ValueError(
                f"gradient_transfer_dtype is {dtype!r}; use one of {', '.join(map(repr, _NARROW))}, "
                "or None to send gradients in the dtypes of their variables"
            )
        return cls(_NARROW[name])

    @property
    def is_quantised(self) -> bool:
        """Whether gradients travel as int8 blocks, see `Int8Layout`; otherwise they travel in `dtype_of` their own."""
        return self.dtype == _INT8

    def dtype_of(self, dtype: Any) -> np.dtype:
        """Return the dtype in which a gradient of this floating-point dtype travels; never a wider one.

        Raises:
            ValueError: Gradients are quantised.
        """
        if self.is_quantised:
            raise ValueError("quantised gradients are not cast; encode them with an Int8Layout")
        own = np.dtype(dtype)
        return own if self.dtype is None or self.dtype.itemsize >= own.itemsize else self.dtype
