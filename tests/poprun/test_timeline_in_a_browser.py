"""The page of a report in Chromium, on light and dark screens. Needs Debian's package chromium."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from xml.sax.saxutils import quoteattr

import pytest
from timeline_jobs import Made

from poprun.trace.merging import put_together
from poprun.trace.report.page import COLOURS, report_page
from poprun.trace.report.verdict import judge

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.job,
    pytest.mark.complete,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
DARK, LIGHT = 0, 1
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
SCALE, WIDTH, HEIGHT = 0.3, 1100, 1500


def screenshot(page, folder, scheme):
    """Return the pixels of a page as rows of (red, green, blue)."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    picture = folder / "page.png"
    words = [
        *OPTIONS,
        f"--force-device-scale-factor={SCALE}",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--user-data-dir={folder / 'profile'}",
        f"--screenshot={picture}",
    ]
    subprocess.run([CHROMIUM, *words, (folder / "page.html").as_uri()], check=True, capture_output=True, timeout=100)
    return pixels_of(picture.read_bytes())


def pixels_of(png):
    """Return the pixels of a PNG with 8 bits per channel (https://www.w3.org/TR/png-3/)."""
    position, data, width, channels = 8, b"", 0, 0
    while position < len(png):
        (length,), kind = struct.unpack_from(">I", png, position), png[position + 4 : position + 8]
        content = png[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, _, depth, colours, _, _, interlaced = struct.unpack(">IIBBBBB", content)
            assert (depth, interlaced) == (8, 0)
            channels = {2: 3, 6: 4}[colours]
        data += content if kind == b"IDAT" else b""
        position += 12 + length
    data, size = zlib.decompress(data), width * channels
    before, rows = bytes(size), []
    for start in range(0, len(data), size + 1):
        before = unfiltered(data[start], bytearray(data[start + 1 : start + 1 + size]), before, channels)
        rows.append([tuple(before[place : place + 3]) for place in range(0, size, channels)])
    return rows


def unfiltered(kind, row, above, channels):
    for place in range(len(row)):
        left = row[place - channels] if place >= channels else 0
        up = above[place]
        corner = above[place - channels] if place >= channels else 0
        nearest = min((left, up, corner), key=lambda value: abs(left + up - corner - value))
        row[place] = (row[place] + (0, left, up, (left + up) // 2, nearest)[kind]) & 0xFF
    return bytes(row)


def rgb(colour):
    whole = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    return tuple(bytes.fromhex(whole))


MEASURE = (
    "<script>addEventListener('load', () => {{ const inside = document.querySelector('iframe').contentDocument;"
    " const cut = [...inside.querySelectorAll('body *')].filter(each => each.scrollWidth > each.clientWidth + 1"
    " && each.clientWidth || each.getBoundingClientRect().right > {width}).map(each => each.outerHTML.slice(0, 60));"
    " document.title = `${{inside.defaultView.innerWidth}} ${{cut.join(' ')}}`; }})</script>"
)


@pytest.mark.parametrize("width", [390, 1200])
def test_a_report_fits_a_phone_and_a_screen(tmp_path, width):
    """A window of Chromium is 500 pixels wide at least, so the page is put into a frame."""
    job = put_together(Made(3, compute_ms={2: 20}, delays_ms={(1, 30): 400}).recordings())
    page = report_page(job, judge(job))
    frame = f'<iframe srcdoc={quoteattr(page)} style="width:{width}px;height:900px;border:0"></iframe>'
    (tmp_path / "frame.html").write_text(frame + MEASURE.format(width=width), encoding="utf-8")
    words = [*OPTIONS, "--window-size=1300,1000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    shown = subprocess.run(
        [CHROMIUM, *words, (tmp_path / "frame.html").as_uri()], check=True, capture_output=True, timeout=100, text=True
    ).stdout
    assert re.search("<title>(.*?)</title>", shown)[1] == f"{width} "


@pytest.mark.parametrize(("scheme", "background", "place"), [(LIGHT, "#fff", 0), (DARK, "#15191d", 1)])
def test_a_report_has_the_colours_of_the_screens_theme(tmp_path, scheme, background, place):
    job = put_together(Made(3, compute_ms={2: 20}, delays_ms={(1, 30): 400}).recordings())
    rows = screenshot(report_page(job, judge(job)), tmp_path, scheme)
    found = Counter(pixel for row in rows for pixel in row)
    assert found.most_common(1)[0][0] == rgb(background)
    bars = {name for name, colours in COLOURS.items() if found[rgb(colours[place])] > 20}
    assert bars >= {"compute", "waiting", "exchange", "update"}
    last = max(number for number, row in enumerate(rows) if set(row) != {rgb(background)})
    assert last > len(rows) / 2, "the page goes on below its first half"
