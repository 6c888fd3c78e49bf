"""An HTML page around a picture: one file, no script, everything escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

_STYLE = "body{font:14px sans-serif;margin:2em;max-width:70em}pre{background:#f4f4f4;padding:1em}"


def section(heading: str, picture: bytes, texts: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The part of a page that shows a picture and texts.

    Args:
        heading: above the picture.
        picture: a PNG file.
        texts: titles, each with its lines.
    """
    encoded = base64.b64encode(picture).decode()
    parts = [
        f"<h1>{html.escape(heading)}</h1>",
        f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{encoded}">',
    ]
    for title, lines in texts:
        text = html.escape("\n".join(lines))
        parts.append(f"<h2>{html.escape(title)}</h2>\n<pre>{text}</pre>")
    return "\n".join(parts)


def page(heading: str, picture: bytes, texts: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A whole page; see `section`."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(heading)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{section(heading, picture, texts)}\n</body></html>\n"
    )
