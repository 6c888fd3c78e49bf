"""A hook of MkDocs: a page that mkdocs.yml names nowhere comes at the end of one section."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

SECTION = "In depth"

log = logging.getLogger("mkdocs.plugins.navigation")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are left over, so that none is written and never found."""
    named = set(_named(config.nav))
    left = sorted(uri for file in files.documentation_pages() if (uri := file.src_uri) not in named)
    for section in config.nav or []:
        if isinstance(section, dict) and SECTION in section:
            section[SECTION].extend(left)
            break
    else:
        log.warning("mkdocs.yml has no section %r for %s", SECTION, ", ".join(left))
    return files


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif nav:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(each)
