"""A hook of MkDocs: links from docs/ to the rest of the repository work on the site too.

In the repository a page links to CONTRIBUTING.md or to a source file. Some files outside docs/
become pages of the site, and links to them lead there. Links to other files become their text:
the site holds no source. A link to a file that is not there is a warning, which ends a strict
build.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
"""Files outside docs/ that become pages, and where on the site."""
ALIASES = {"README.md": "index.md", "docs/README.md": "index.md"}

_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")

log = logging.getLogger("mkdocs.plugins.links")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    root = Path(config.docs_dir).parent
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(root / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of one page, code blocks left out."""
    root = Path(config.docs_dir).parent
    place = Path(config.docs_dir).name
    uri = page.file.src_uri
    origin = next((name for name, other in PAGES.items() if other == uri), f"{place}/{uri}")

    def rewritten(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if "://" in target or target.startswith(("mailto:", "/")):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if path.startswith(f"{place}/") and path not in ALIASES:
            goal = path.removeprefix(f"{place}/")
        elif path in PAGES or path in ALIASES:
            goal = (PAGES | ALIASES)[path]
        elif (root / path).exists() and not path.startswith(".."):
            return link["text"]
        else:
            log.warning("%s links to %s, which is not there", origin, target)
            return link[0]
        return f"[{link['text']}]({os.path.relpath(goal, posixpath.dirname(uri) or '.')}{anchor})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewritten, markdown[end:])])
