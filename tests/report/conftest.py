"""Runs to report, and a Chromium to look at the pages with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from megatron_ext import cli

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The Chromium of this machine."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium: run scripts/install_debian_packages.sh chromium, or install one")
    with sync_playwright() as playwright:
        # Root has no sandbox; what is opened was written here.
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Opened:
    """A page, and what it did that it should not have."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:
    """Opens a file with settings of a browser context."""
    contexts = []

    def open_file(path: Path, **settings: Any) -> Opened:
        settings.setdefault("viewport", {"width": 1200, "height": 800})
        context = browser.new_context(**settings)
        contexts.append(context)
        opened = Opened(context.new_page())
        page = opened.page
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(path.as_uri())
        return opened

    yield open_file
    for context in contexts:
        context.close()


def simulate(folder: Path, flags: str) -> Path:
    """Traces of a simulated run, in the format of a training's."""
    words = ["simulate", *flags.split(), "--no-baseline", "--trace", str(folder), "--json"]
    assert cli.main(words) == 0
    return folder


LOG = (
    " [2026-01-01 00:00:00] iteration {step:8d}/     200 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): 100.0 | learning rate: 1.000000E-03 | "
    "global batch size:    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.000 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def write_log(path: Path, *, fault: float = 0.0) -> Path:
    """The console log of a run of 200 steps; after 60% its loss is higher by `fault`."""
    lines = []
    for step in range(1, 201):
        noise = 0.002 * ((step * 7919) % 13 - 6) / 6
        loss = 3.0 * (1 + 0.8 * (1 - step / 200) ** 2) * (1 + noise)
        loss *= 1 + (fault if step > 120 else 0.0)
        lines.append(LOG.format(step=step, samples=16 * step, loss=loss))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path
