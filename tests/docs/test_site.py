"""The site of the documentation: built without a warning, from the program, self-contained."""

from __future__ import annotations

import argparse
import html
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from megatron_ext import __main__ as runner
from megatron_ext import arguments, cli
from megatron_ext.pipeline import metrics
from tests.docs.examples import PAGES, REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI does it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    """What a reader sees of a page."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page.read_text())).split())


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {
        name
        for action in parser._actions
        for name in action.option_strings
        if not isinstance(action, argparse._HelpAction)
    }


def test_every_flag_of_a_training_is_there(site: Path) -> None:
    text = text_of(site / "reference" / "flags.html")
    ours = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = flags_of(ours) | flags_of(runner.build_parser())
    assert {"--cpu", "--rrfp-hint", "--pipedream-2bw", "--collapse-reference"} < flags
    assert not [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)]
    for action in ours._actions:
        said = " ".join((action.help or "").split("(default")[0].replace("%%", "%").split())
        assert action.dest == "help" or said.strip() in text, action.dest


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_flag_of_a_command_is_there(
    site: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(site / "reference" / "commands.html")
    sections = re.split(r"(?=megatron-ext [a-z-]+¶)", text)
    assert any(part.startswith(f"megatron-ext {command}¶") for part in sections)
    pending, seen = [[command]], 0
    while pending:
        words = pending.pop()
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        help_text = capsys.readouterr().out
        assert f"megatron-ext {' '.join(words)}¶" in text
        for flag in set(re.findall(r"^ +(?:-\w(?: \S+)?, )?(--[a-z0-9-]+)", help_text, re.M)):
            seen += flag != "--help"
            assert flag == "--help" or f"{flag} " in text, f"{words} {flag}"
        for word in re.findall(r"^    ([a-z][a-z-]*)(?:  |$)", help_text, re.M):
            pending.append([*words, word])
    assert seen, command


def test_every_metric_is_there_with_its_unit(site: Path) -> None:
    text = (site / "reference" / "metrics.html").read_text()
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", text, re.S)]
    units = {html.unescape(cells[0]): cells[1] for cells in rows if cells}
    names = [name if "/" in name else f"rrfp/{name}" for name in metrics.FIGURES]
    assert units["<code>rrfp/batch (ms)</code>"] == "milliseconds"
    assert units["<code>collapse/residual</code>"] == "of the final loss"
    assert {f"<code>{name}</code>" for name in names} <= set(units)


def test_every_flag_says_what_it_does(site: Path) -> None:
    for name in ("flags", "commands"):
        rows = re.findall(r"<tr>.*?</tr>", (site / "reference" / f"{name}.html").read_text(), re.S)
        assert rows
        assert not [row for row in rows if re.search(r"<td>\s*</td>", row)]


class _Loaded(HTMLParser):
    """What a browser loads for a page by itself; links that a reader may follow are not."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"script": "src", "img": "src", "iframe": "src", "link": "href"}.get(tag)
        self.addresses += [value or "" for name, value in attrs if name == wanted]


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        assert loaded.addresses
        assert not [where for where in loaded.addresses if "//" in where], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_every_page_can_be_reached(site: Path) -> None:
    linked = set(re.findall(r'href="([^"#]+)"', (site / "index.html").read_text()))
    for page in PAGES:
        if page.is_relative_to(REPOSITORY / "docs"):
            assert str(page.relative_to(REPOSITORY / "docs").with_suffix(".html")) in linked


@pytest.fixture
def hook() -> Callable[[str], Any]:
    """Imports one of the site's hooks, which MkDocs loads by its path."""

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(
            f"site_{name}", REPOSITORY / "scripts" / "site" / f"{name}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_metric_that_nobody_explains_ends_the_build(
    hook: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FIGURES", (*metrics.FIGURES, "new (ms)"))
    with pytest.raises(PluginError, match=r"what 'rrfp/new \(ms\)' means"):
        hook("reference").metric_table()


def test_a_metric_that_is_gone_ends_the_build(
    hook: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FIGURES", metrics.FIGURES[1:])
    with pytest.raises(PluginError, match="has 'rrfp/bubble fraction', which is not logged"):
        hook("reference").metric_table()


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("[text](../CONTRIBUTING.md#style)", "[text](project/contributing.md#style)"),
        ("[text](../README.md)", "[text](index.md)"),
        ("[`cli.py`](../megatron_ext/cli.py)", "`cli.py`"),
        ("[text](hints.md#the-limit)", "[text](hints.md#the-limit)"),
        ("[text](https://arxiv.org)", "[text](https://arxiv.org)"),
        ("[text](../missing.md)", "[text](../missing.md)"),
        (
            "```text\n[text](../megatron_ext/cli.py)\n```",
            "```text\n[text](../megatron_ext/cli.py)\n```",
        ),
    ],
)
def test_links_out_of_the_docs(
    hook: Callable[[str], Any], caplog: pytest.LogCaptureFixture, link: str, found: str
) -> None:
    links = hook("links")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="collapse.md"))
    config = SimpleNamespace(docs_dir=str(REPOSITORY / "docs"))
    assert links.on_page_markdown(link, page=page, config=config, files=None) == found
    assert ("is not there" in caplog.text) == ("missing" in link)


def test_a_page_without_a_place_comes_last_in_one_section(hook: Callable[[str], Any]) -> None:
    names = ["index.md", "new.md", "hints.md"]
    files = SimpleNamespace(
        documentation_pages=lambda: [SimpleNamespace(src_uri=name) for name in names]
    )
    config = SimpleNamespace(nav=[{"Home": "index.md"}, {"In depth": ["hints.md"]}])
    hook("navigation").on_files(files, config=config)
    assert config.nav == [{"Home": "index.md"}, {"In depth": ["hints.md", "new.md"]}]


def test_prose_names_only_flags_that_exist() -> None:
    ours = flags_of(arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    prefix = r"--(?:rrfp|pipedream-2bw|collapse|pipeline-schedule)[a-z0-9-]*\*?"
    named = 0
    for page in PAGES:
        for flag in re.findall(prefix, page.read_text()):
            named += 1
            if flag.endswith(("-", "*")):
                assert any(name.startswith(flag.rstrip("*")) for name in ours), f"{page}: {flag}"
            else:
                assert flag in ours, f"{page}: {flag}"
    assert named > 100
