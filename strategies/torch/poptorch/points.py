"""PopTorch's operators on clouds of points, which are those of `torch_cluster`: they return numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from strategies.switches import require_switches

Batch: TypeAlias = "Sequence[int] | torch.Tensor | None"


def fps(src: torch.Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """A part of the points of each cloud, each of them the farthest from all that were taken before.

    Source: Qi et al., PointNet++, 2017 (farthest point sampling). Of points that are as far the first one is taken.

    Args:
        src: the points of all clouds, `[points, features]`.
        ptr: where each cloud begins, and where the last one ends.
        ratio: which part of a cloud is taken, at least one point; above 0, and 1 at most.
        random_start: whether the first point is drawn; otherwise it is the first of its cloud.

    Returns:
        Their rows in `src`, int64, cloud by cloud, in the order in which they were taken.

    Raises:
        TypeError: if `random_start` is neither True nor False.
        ValueError: if `ptr` does not cut the points into clouds that have some, or the ratio is out of range.
    """
    require_switches(random_start=random_start)
    bounds = [int(each) for each in ptr]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(src) or sorted(set(bounds)) != bounds:
        raise ValueError(
            f"ptr is {bounds} for {len(src)} points; it begins with 0, ends with their number, and grows in between"
        )
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}; it is the part of the points to be taken: above 0, and 1 at most")
    taken = [
        begin + _farthest(src[begin:end], math.ceil(ratio * (end - begin)), random_start)
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.cat(taken)


def _farthest(points: torch.Tensor, count: int, random_start: bool) -> torch.Tensor:
    points = points.detach()
    rows = [int(torch.randint(len(points), ())) if random_start else 0]
    nearest_taken = torch.full((len(points),), math.inf, dtype=points.dtype)
    while len(rows) < count:
        distances = (points - points[rows[-1]]).square().flatten(1).sum(1)
        nearest_taken = torch.minimum(nearest_taken, distances)
        nearest_taken[rows[-1]] = -1.0  # is not taken again, also where all points are the same
        rows.append(int(nearest_taken.argmax()))
    return torch.tensor(rows)


def nearest(x: torch.Tensor, y: torch.Tensor, batch_x: Batch = None, batch_y: Batch = None) -> torch.Tensor:
    """For each row of `x` the nearest row of `y`, by Euclid, in the same sample; of several the first.

    Args:
        x: points, `[points, features]`, or `[points]`.
        y: points with as many features.
        batch_x: for each row of `x` its sample, sorted; None: all are of one.
        batch_y: the same of `y`.

    Returns:
        Rows of `y`, int64.

    Raises:
        ValueError: if a sample has rows in `x` and none in `y`, or there is not one for each row, in order.
    """
    of_x, of_y = _samples("batch_x", batch_x, len(x)), _samples("batch_y", batch_y, len(y))
    if lacking := sorted(set(of_x.tolist()) - set(of_y.tolist())):
        raise ValueError(f"sample {lacking[0]} has points in x and none in y; give it some, or leave those of x out")
    x, y = x.detach().reshape(len(x), -1), y.detach().reshape(len(y), -1)
    found = torch.empty(len(x), dtype=torch.int64)
    for sample in of_x.unique().tolist():
        [rows] = torch.nonzero(of_y == sample, as_tuple=True)
        found[of_x == sample] = rows[torch.cdist(x[of_x == sample], y[rows]).argmin(1)]
    return found


def _samples(name: str, batch: Batch, count: int) -> torch.Tensor:
    if batch is None or not len(batch):
        return torch.zeros(count, dtype=torch.int64)
    samples = torch.as_tensor(batch)
    if samples.shape != (count,) or bool((samples[1:] < samples[:-1]).any()):
        raise ValueError(
            f"{name} is of shape {list(samples.shape)} for {count} points; it has the sample of each, sorted"
        )
    return samples
