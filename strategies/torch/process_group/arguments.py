"""Checks of the arguments of collectives: lengths of lists, sizes, dtypes and splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from collectives import LayoutMismatchError
from strategies.torch.process_group.arrays import description


def refuse_others_than(tensor: torch.Tensor, tensors: Sequence[torch.Tensor], size: int, title: str) -> None:
    """Refuse a list that does not have one tensor per rank, each of the size and dtype of `tensor`."""
    if len(tensors) != size:
        raise ValueError(f"{title} was called with a list of {len(tensors)} tensors in a group of {size} ranks")
    for each in tensors:
        if each.dtype != tensor.dtype or each.numel() != tensor.numel():
            raise ValueError(
                f"{title} was called with {description(tensor)} and, in the list, {description(each)}; the backend "
                "popdist needs tensors of equal size and dtype, so pad them"
            )


def refuse_uneven(whole: torch.Tensor, part: torch.Tensor, size: int, title: str) -> None:
    """Refuse a tensor of blocks that does not have one block per rank, each of the size and dtype of `part`."""
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ValueError(
            f"{title} was called with {description(whole)} and {description(part)} in a group of {size} ranks; the "
            f"larger one has to have {size} times the elements of the other one, and the same dtype"
        )


def splits_of(tensor: torch.Tensor, splits: Sequence[int], size: int, title: str) -> list[int]:
    """Return the number of rows for each rank; no splits: equal numbers."""
    length = tensor.shape[0] if tensor.dim() else 0
    if not splits and length % size == 0:
        return [length // size] * size
    if len(splits) != size or sum(splits) != length:
        raise ValueError(
            f"the {title} of all_to_all_single has {length} rows and the splits {list(splits)} in a group of {size} "
            "ranks; give one split per rank, whose sum is the number of rows"
        )
    return list(splits)


def refuse_crossed_sizes(sizes: np.ndarray) -> None:
    """Refuse parts that do not fit; every rank sees all sizes and raises the same error.

    Args:
        sizes: Bytes that rank i sends to rank j (i, 0, j), and that rank i expects from rank j (i, 1, j).
    """
    for source, (sent, _) in enumerate(sizes):
        for to, nbytes in enumerate(sent):
            if nbytes != sizes[to, 1, source]:
                raise LayoutMismatchError(
                    f"all_to_all: rank {source} sends {nbytes} bytes to rank {to}, which expects "
                    f"{sizes[to, 1, source]}; give splits that fit on all ranks"
                )
