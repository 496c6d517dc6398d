"""PopTorch's operators on points, and its decoder of sequences, against what they are by definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import strategies.torch.poptorch as poptorch
from strategies import StrategyError


def points(count, features=3):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(count))


class TestFarthestPoints:
    @pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 1.0])
    def test_are_each_the_farthest_from_those_before(self, ratio):
        src, ptr = points(17), [0, 5, 6, 17]
        taken = poptorch.fps(src, ptr, ratio).tolist()
        for begin, end in itertools.pairwise(ptr):
            of_cloud = [taken.pop(0) for _ in range(math.ceil(ratio * (end - begin)))]
            assert of_cloud[0] == begin
            for number, row in enumerate(of_cloud[1:], 1):
                distances = torch.cdist(src[begin:end], src[of_cloud[:number]]).amin(1)
                assert distances.argmax() == row - begin
        assert not taken

    def test_are_all_taken_once_where_they_are_the_same(self):
        assert sorted(poptorch.fps(torch.ones(4, 2), [0, 4], 1.0).tolist()) == [0, 1, 2, 3]

    def test_may_begin_with_one_that_is_drawn(self):
        torch.manual_seed(0)
        begun = {int(poptorch.fps(points(8), [0, 8], 0.1, random_start=True)) for _ in range(40)}
        assert begun <= set(range(8))
        assert len(begun) > 2

    @pytest.mark.parametrize("ptr", [[0], [0, 3], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4]])
    def test_need_clouds_that_have_all_points(self, ptr):
        with pytest.raises(ValueError, match=r"ptr is \[.*\] for 4 points; it begins with 0"):
            poptorch.fps(points(4), ptr)

    @pytest.mark.parametrize("ratio", [0.0, 1.1])
    def test_are_a_part(self, ratio):
        with pytest.raises(ValueError, match="ratio is .*; it is the part of the points"):
            poptorch.fps(points(4), [0, 4], ratio)


class TestNearest:
    def test_is_that_of_the_same_sample(self):
        x, y = points(6), points(9)
        of_x, of_y = [0, 0, 1, 1, 1, 3], [0, 0, 0, 1, 2, 2, 3, 3, 3]
        found = poptorch.nearest(x, y, of_x, torch.tensor(of_y)).tolist()
        for row, sample, place in zip(x, of_x, found, strict=True):
            rows = [number for number, other in enumerate(of_y) if other == sample]
            assert place == min(rows, key=lambda number: float((row - y[number]).norm()))

    def test_is_that_of_all_where_no_samples_are_said(self):
        assert poptorch.nearest(torch.tensor([0.1, 2.9]), torch.tensor([3.0, 1.0, 0.0])).tolist() == [2, 0]

    def test_has_to_be_there(self):
        with pytest.raises(ValueError, match="sample 1 has points in x and none in y"):
            poptorch.nearest(points(2), points(2), [0, 1], [0, 0])

    @pytest.mark.parametrize("batch", [[0], [1, 0]])
    def test_needs_the_sample_of_each_in_order(self, batch):
        with pytest.raises(ValueError, match="batch_x is of shape .* for 2 points; it has the sample of each, sorted"):
            poptorch.nearest(points(2), points(2), batch)


def likelihoods(rows, blank):
    """The probability of all labels of a sequence: of every alignment the product, added up."""
    found = {}
    for alignment in itertools.product(range(len(rows[0])), repeat=len(rows)):
        labels = tuple(label for label, _ in itertools.groupby(alignment) if label != blank)
        found[labels] = found.get(labels, 0.0) + math.prod(row[each] for row, each in zip(rows, alignment, strict=True))
    return sorted(found.items(), key=lambda item: -item[1])


class TestDecoding:
    @pytest.mark.parametrize("blank", [0, 2])
    def test_finds_the_labels_to_which_alignments_add_up(self, blank):
        generator = torch.Generator().manual_seed(blank)
        probs = torch.randn(5, 3, 3, generator=generator).mul(2).log_softmax(-1)
        lengths = torch.tensor([5, 3, 4])
        scores, counts, labels = poptorch.ctc_beam_search_decoder(probs, lengths, blank, top_paths=4)
        for row, length in enumerate(lengths.tolist()):
            expected = likelihoods(probs[:length, row].exp().tolist(), blank)[:4]
            found = [tuple(path[:count].tolist()) for path, count in zip(labels[row], counts[row], strict=True)]
            assert found == [path for path, _ in expected]
            assert scores[row].exp().tolist() == pytest.approx([value for _, value in expected], rel=1e-5)
            assert all((path[count:] == blank).all() for path, count in zip(labels[row], counts[row], strict=True))

    def test_with_one_beam_keeps_the_likeliest_beginning(self):
        probs = torch.tensor([[[0.6, 0.4]], [[0.6, 0.4]]]).log()
        wide, narrow = (poptorch.ctc_beam_search_decoder(probs, torch.tensor([2]), 0, width) for width in (2, 1))
        assert wide[1].tolist() == [[1]], "of blank and 1 in turn, and 1 twice: 0.64"
        assert wide[0].exp().item() == pytest.approx(0.64)
        assert narrow[1].tolist() == [[0]], "what begins with 1 was dropped"
        assert narrow[0].exp().item() == pytest.approx(0.36)

    def test_has_no_more_paths_than_there_are(self):
        probs = torch.zeros(1, 1, 2).log_softmax(-1)
        scores, counts, _ = poptorch.ctc_beam_search_decoder(probs, torch.tensor([1]), top_paths=3)
        assert scores[0, 2] == -math.inf
        assert counts.tolist() == [[0, 1, 0]]

    def test_refuses_what_does_not_fit(self):
        probs, lengths = torch.zeros(4, 2, 3), torch.tensor([4, 4])
        with pytest.raises(TypeError, match="lengths is a list; give a tensor"):
            poptorch.ctc_beam_search_decoder(probs, [4, 4])
        with pytest.raises(ValueError, match=r"lengths of \[1\], and the blank is 0"):
            poptorch.ctc_beam_search_decoder(probs, torch.tensor([4]))
        with pytest.raises(ValueError, match="the blank is 3; they are"):
            poptorch.ctc_beam_search_decoder(probs, lengths, blank=3)
        with pytest.raises(ValueError, match=r"lengths are \[4, 4\] for 3 inputs"):
            poptorch.ctc_beam_search_decoder(probs[:3], lengths)
        with pytest.raises(StrategyError, match="top_paths is 3, and 2 beams are kept"):
            poptorch.ctc_beam_search_decoder(probs, lengths, beam_width=2, top_paths=3)
