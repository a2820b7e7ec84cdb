from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from surefoot.records import Reward
from surefoot.tracking.sparkline import BARS, sparkline
from surefoot.tracking.text import head, printable, reward_as_text, tail
from tests.tracking.helpers import make_rollout


def test_a_sparkline_by_hand():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([0, math.nan, 1]) == "▁ █"
    assert sparkline([0, 0, 3, 3, 7, 7], width=3) == "▁▄█"


@given(st.lists(st.floats(), max_size=60), st.integers(0, 30))
def test_a_sparkline_never_fails_and_has_its_width(values: list[float], width: int):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BARS) | {" "}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20, unique=True))
def test_a_sparkline_keeps_the_order_of_the_values(values: list[float]):
    line = sparkline(values, 20)
    pairs = sorted(zip(values, line, strict=True))
    assert [bar for _, bar in pairs] == sorted(line)
    assert (pairs[0][1], pairs[-1][1]) == (BARS[0], BARS[-1])


@given(st.text(st.characters()))
def test_printable_text_has_no_control_characters_and_stays_in_one_line(text: str):
    shown = printable(text)
    assert all(character.isprintable() or character.isspace() for character in shown)
    assert "\x1b" not in shown
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")


def test_escapes_and_line_ends_are_made_visible():
    assert printable("a\x1b[2Jb\nc\td\u202e\ud83d") == "a\\x1b[2Jb⏎c→d\\u202e\\ud83d"


def test_cuts_are_marked():
    assert (head("abcdef", 4), tail("abcdef", 4)) == ("abc…", "…def")
    assert (head("abcd", 4), tail("abcd", 4), head("abc", 0), tail("abc", 0)) == ("abcd", "abcd", "", "")


def test_a_reward_in_words():
    assert (
        reward_as_text(make_rollout(reward=Reward(0.5, {"exact": 0.0, "format": 1.0})))
        == "reward 0.5  (exact 0, format 1)  stop"
    )
    assert (
        reward_as_text(make_rollout(reward=Reward(None, error="slow\n"), finish_reason="length"))
        == "no reward: slow⏎  length"
    )
    assert reward_as_text(make_rollout()) == "no reward  stop"
