"""The reported bugs, and one that nobody reported: a range inside another must not shorten it."""

from ranges import merge


def test_touching_ranges_become_one():
    assert merge([(1, 3), (4, 6)]) == [(1, 6)]


def test_a_gap_stays_a_gap():
    assert merge([(1, 3), (5, 6)]) == [(1, 3), (5, 6)]


def test_nothing_gives_nothing():
    assert merge([]) == []


def test_a_range_inside_another_does_not_shorten_it():
    assert merge([(1, 10), (2, 3), (11, 12)]) == [(1, 12)]


def test_order_does_not_matter():
    assert merge([(8, 9), (1, 2), (2, 4)]) == [(1, 4), (8, 9)]
