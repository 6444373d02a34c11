"""Renders recorded terminal output as an SVG that plays line by line in a web page."""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.text import Text

WIDTH = 108  # columns; longer lines are wrapped
PACE_S = 0.25  # between two lines, whatever time they took in reality
# Fonts of the viewer's machine: fetching a web font would reveal to a third party who views the page.
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
STYLE = """
@keyframes ask-shown { from { visibility: hidden } to { visibility: visible } }
.ask-matrix text { visibility: hidden; animation: ask-shown 0.01s linear forwards }
@media (prefers-reduced-motion: reduce) { .ask-matrix text { visibility: visible; animation: none } }
"""


def svg(shown: Text, title: str) -> str:
    """An SVG of `shown` whose lines appear one after another below `title`."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False, markup=False)
    rows = 0
    for line in shown.split("\n", allow_blank=True):
        rows += max(1, len(line.wrap(console, WIDTH)))
        console.print(line)
    text = console.export_svg(title=title, unique_id="ask")
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;]*;", f"font-family: {FONT};", text)
    text = text.replace("</style>", f"{STYLE}</style>", 1)
    for row in range(rows):
        at = f'clip-path="url(#ask-line-{row})"'
        text = text.replace(at, f'{at} style="animation-delay: {PACE_S * (row + 1):.2f}s"')
    return text
