"""Dark variants of pictures."""

from __future__ import annotations

import re

DARK = "<style>@media (prefers-color-scheme:dark){svg{filter:invert(.92) hue-rotate(180deg)}}</style>"
"""A style that turns light colours into dark colours of the same hue if the reader's page is dark."""


def with_dark(picture: str) -> str:
    """Return an SVG picture on a light background with a dark variant."""
    return re.sub(r"(<svg\b[^>]*>)", rf"\1\n{DARK}", picture, count=1)
