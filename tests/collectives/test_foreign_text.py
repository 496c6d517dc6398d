"""Foreign texts in logs and errors."""

import json

import pytest

from collectives.calls import MOST, MOST_OF_PEERS, describe_mismatch, foreign
from collectives.network.hello import Hello


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, \u00e4\u00f6\u00fc too", "plain text, \u00e4\u00f6\u00fc too"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\u202edesrever \x00 \ud800 \U000e0001", r"\u202edesrever \x00 \ud800 \U000e0001"),
        ("x" * MOST, "x" * MOST),
        ("x" * 1000, "x" * MOST + " ... (1000 characters)"),
    ],
)
def test_a_text_is_one_printable_line_of_limited_length(text, shown):
    assert foreign(text) == shown
    assert shown.isprintable()


def test_call_descriptions_of_peers_are_shown_as_one_short_line():
    text = describe_mismatch(["close", "all_reduce\n\x1b[2J" + "x" * 100_000])
    assert text.isprintable()
    assert len(text) < MOST_OF_PEERS + 300


TOO_LARGE = Hello(protocol=10**4000, cluster="", source=0, to=0, incarnation="")


@pytest.mark.parametrize("text", [json.dumps({"\x1b[2J\n" + "x" * 5000: 1}), TOO_LARGE.encode()])
def test_the_reason_for_an_unreadable_hello_is_shown_as_one_short_line(text):
    with pytest.raises(ValueError, match="unexpected keyword argument|protocol is too large a number") as error:
        Hello.decode(text)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 2 * MOST
