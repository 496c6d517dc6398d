"""Quotes around ranges of hosts in all texts that a user may copy: a shell takes brackets for a pattern."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES

from poprun.cli.launch_options import OPTIONS
from poprun.cli.options import OptionKind
from poprun.errors import UsageError
from poprun.hosts.hosts import parse_hosts

ROOT = Path(__file__).parents[2]
RANGE = re.compile(r"(?<![\w'])[a-z]+\[\d+[-,][^\]]*\](?!')")
COMMAND = re.compile(r"(?:--host|-H)[ =][a-z]+\[")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_of_the_documentation_quote_ranges(path):
    assert COMMAND.findall(path.read_text(encoding="utf-8")) == []


def test_the_help_quotes_ranges():
    texts = [option.help for option in OPTIONS] + [OptionKind.HOSTS.needs]
    assert [found for text in texts for found in RANGE.findall(text)] == []


@pytest.mark.parametrize("hosts", ["node[2-0]", "a;b"])
def test_messages_with_a_way_out_quote_ranges(hosts):
    with pytest.raises(UsageError) as refusal:
        parse_hosts([hosts])
    way_out = str(refusal.value).rpartition("; ")[2]
    assert "'node[0-2,4]" in way_out
    assert RANGE.findall(way_out.replace("'node[0-2,4],login'", "")) == []
