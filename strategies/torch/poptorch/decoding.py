"""PopTorch's decoder of connectionist temporal classification."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import torch

from strategies.errors import StrategyError
from strategies.numbers import at_least, positive

Labels = tuple[int, ...]


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely labels of sequences: those to which the most likely alignments add up, as far as beams go.

    Source: Graves et al., Connectionist Temporal Classification, ICML 2006; prefixes are kept in a beam. It is computed
    on the host, in Python: for looking at what a model has learned, and not in the midst of a training.

    Args:
        probs: logarithms of probabilities, `[input_length, batch_size, num_classes]`.
        lengths: of the sequences, `[batch_size]`.
        blank: the class that is no label.
        beam_width: how many beginnings are kept after each input.
        top_paths: how many of the most likely labels are returned.

    Returns:
        The logarithms of their probabilities, `[batch_size, top_paths]`; how many labels they have, int32, of the same
        shape; the labels, int32, `[batch_size, top_paths, input_length]`, with blanks behind. Where fewer are found,
        the logarithm is minus infinity.

    Raises:
        TypeError: if `probs` or `lengths` is no tensor, or a number none.
        ValueError: if they do not fit each other.
        StrategyError: if more paths are asked for than beams are kept.
    """
    _refuse_shapes(probs, lengths, at_least(0, "blank", blank))
    if positive("top_paths", top_paths) > positive("beam_width", beam_width):
        raise StrategyError(f"top_paths is {top_paths}, and {beam_width} beams are kept; use a larger beam_width")
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), -math.inf, dtype=probs.dtype)
    counts = torch.zeros((batch, top_paths), dtype=torch.int32)
    labels = torch.full((batch, top_paths, steps), blank, dtype=torch.int32)
    for row, rows in enumerate(probs.detach().double().transpose(0, 1)):
        found = _beams(rows[: int(lengths[row])].tolist(), blank, beam_width)
        for place, (path, beam) in enumerate(found[:top_paths]):
            scores[row, place], counts[row, place] = beam.total, len(path)
            labels[row, place, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return scores, counts, labels


def _refuse_shapes(probs: torch.Tensor, lengths: torch.Tensor, blank: int) -> None:
    for name, given in {"probs": probs, "lengths": lengths}.items():
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}; give a tensor")
    if probs.ndim != 3 or lengths.shape != probs.shape[1:2] or blank >= probs.shape[2]:
        raise ValueError(
            f"probs is of shape {list(probs.shape)}, lengths of {list(lengths.shape)}, and the blank is {blank}; they "
            "are [input_length, batch_size, num_classes], [batch_size], and one of the classes"
        )
    if bool((lengths < 0).any()) or bool((lengths > len(probs)).any()):
        raise ValueError(f"lengths are {lengths.tolist()} for {len(probs)} inputs; none is longer than these")


class _Beam(NamedTuple):
    """The logarithms of the probabilities that a beginning of labels ends with a blank, and with its last label."""

    blank: float
    label: float

    @property
    def total(self) -> float:
        return _added(self.blank, self.label)


_NEVER = _Beam(-math.inf, -math.inf)


def _beams(rows: list[list[float]], blank: int, width: int) -> list[tuple[Labels, _Beam]]:
    """The most likely labels and their beams, the likeliest first; of those that are as likely the smaller ones."""
    beams: dict[Labels, _Beam] = {(): _Beam(0.0, -math.inf)}
    for row in rows:
        following: dict[Labels, _Beam] = defaultdict(lambda: _NEVER)
        for path, beam in beams.items():
            before = following[path]
            stays = beam.label + row[path[-1]] if path else -math.inf
            following[path] = _Beam(_added(before.blank, beam.total + row[blank]), _added(before.label, stays))
            for label, score in enumerate(row):
                if label != blank:
                    from_ = beam.blank if path and label == path[-1] else beam.total
                    longer = following[(*path, label)]
                    following[(*path, label)] = longer._replace(label=_added(longer.label, from_ + score))
        beams = dict(_best(following)[:width])
    return [(path, beam) for path, beam in _best(beams) if beam.total > -math.inf]


def _best(beams: dict[Labels, _Beam]) -> list[tuple[Labels, _Beam]]:
    return sorted(beams.items(), key=lambda item: (-item[1].total, item[0]))


def _added(one: float, other: float) -> float:
    """The logarithm of the sum of two numbers, of their logarithms."""
    high, low = max(one, other), min(one, other)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
