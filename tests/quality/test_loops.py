# SPDX-License-Identifier: MIT
"""Loops in texts worked by hand."""

import pytest

from pyhobbit.quality.loops import Loop, longest_loop, repeated_share

PLAIN = list(range(1000, 1200))


def test_repeated_runs_are_counted_from_their_second_time_on() -> None:
    assert repeated_share([1, 2, 3, 1, 2, 3], n=3) == 1 / 4  # 123 231 312 123
    assert repeated_share([5] * 10, n=8) == 2 / 3
    assert repeated_share([*range(8), *range(8)]) == 1 / 9
    assert repeated_share([*range(7), 99, *range(7)]) == 0
    assert repeated_share([1, 2, 3], n=3) == 0
    assert repeated_share([1, 2], n=3) == 0


@pytest.mark.parametrize("period", [1, 7, 8, 12, 100])
def test_a_loop_is_found_wherever_it_lies(period: int) -> None:
    copies = 40 if period < 8 else 3
    loop = list(range(period)) * copies
    wanted = Loop(period, 200, period * copies)
    assert longest_loop([*PLAIN, *loop]) == wanted
    assert longest_loop([*PLAIN, *loop, *PLAIN]) == wanted
    assert longest_loop(loop) == Loop(period, 0, period * copies)


def test_the_last_copy_may_be_cut_short() -> None:
    text = [*PLAIN, *(list(range(10)) * 3), 0, 1, 2, 3, 99]
    assert longest_loop(text) == Loop(10, 200, 34)


def test_less_than_three_copies_or_24_tokens_are_no_loop() -> None:
    assert longest_loop([*PLAIN, *(list(range(50)) * 2), *range(49)]) is None
    assert longest_loop([*PLAIN, *(list(range(50)) * 3)]) is not None
    assert longest_loop([7] * 23) is None
    assert longest_loop([7] * 24) == Loop(1, 0, 24)
    assert longest_loop([*PLAIN, *PLAIN]) is None
    assert longest_loop([]) is None


def test_longer_periods_than_asked_for_are_not_seen() -> None:
    text = list(range(101)) * 4
    assert longest_loop(text) is None
    assert longest_loop(text, max_period=101) == Loop(101, 0, 404)


def test_the_longest_of_several_loops_counts() -> None:
    text = [*([1] * 30), *PLAIN, *([2, 3] * 20), *PLAIN, *([4] * 30)]
    assert longest_loop(text) == Loop(2, 230, 40)
