"""A web page in one piece: no scripts, no other files."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2em; }
table { border-collapse: collapse; font-size: 0.9em; }
th, td { padding: 0.3em 0.7em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th.text, td.text { text-align: left; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns the HTML of a page.

    Args:
        title: text of the title and the headline.
        parts: HTML of what follows.
    """
    lines = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"
