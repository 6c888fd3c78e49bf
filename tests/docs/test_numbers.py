"""Numbers that pages quote from measurements are those of docs/data and of the pages measured.

A new measurement changes the data; then the pages that quote it must follow, and fail here first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.docs.examples import REPOSITORY

DOCS = REPOSITORY / "docs"


@cache
def data(name: str) -> Any:
    return json.loads((DOCS / "data" / f"{name}.json").read_text())


def speed(hint: str, limit: str, clip: str | None = None, iterations: int = 1) -> str:
    """Speed over Megatron's 1F1B at sigma 0.3."""
    (found,) = [
        record
        for record in data("bench_schedules")["results"]
        if (record["hint"], record["live_limit"], record["clip"]) == (hint, limit, clip)
        and record["iterations"] == iterations
        and record["sigma"] == 0.3
    ]
    return f"{found['speedup']:.2f}"


def slowdown(hint: str, limit: str, jitter: str) -> str:
    """By injected delays, in per cent."""
    (found,) = [
        record
        for record in data("bench_jitter")["results"]
        if (record["hint"], record["live_limit"], record["jitter"]) == (hint, limit, jitter)
    ]
    return f"{found['slowdown']:.1%}"


def loss(optimizer: str, mode: str) -> float:
    """Mean validation loss over the seeds."""
    return next(
        record["val_loss"]
        for record in data("convergence")["results"]
        if (record["optimizer"], record["mode"]) == (optimizer, mode)
    )


def gap(optimizer: str) -> str:
    return f"{loss(optimizer, '2bw') - loss(optimizer, 'sync'):.3f}"


def closed(optimizer: str) -> str:
    late = loss(optimizer, "2bw")
    share = (late - loss(optimizer, "2bw+ef")) / (late - loss(optimizer, "sync"))
    return f"{share:.0%}"


def activations(run: str, stage: int) -> str:
    """KiB."""
    return f"{data('memory')['runs'][run][stage]['activations'] / 1024:,.0f}"


def hint_speeds(row: str) -> str:
    """Simulated, 8 stages, sigma 0.3, messages free and of 0.3 F, from the table of hints.md."""
    text = (DOCS / "hints.md").read_text()
    cells = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE)
    assert cells is not None, row
    return " ".join(cells[1].replace("|", " ").split()[2:4])


# Page, and the text that must be in it.
QUOTED: list[tuple[str, Callable[[], str]]] = [
    (
        "explanation/readiness.md",
        lambda: f"| 1F1B's fixed order | `p` | {speed('1f1b', 'p')}x |",
    ),
    ("explanation/readiness.md", lambda: f"| ready tasks (`bf`) | `p` | {speed('bf', 'p')}x |"),
    ("explanation/readiness.md", lambda: f"| 1F1B's fixed order | `2p` | {speed('1f1b', '2p')}x |"),
    ("explanation/readiness.md", lambda: f"| ready tasks (`bf`) | `2p` | {speed('bf', '2p')}x |"),
    ("explanation/readiness.md", lambda: f"(`bfw`) | `p` | {speed('bfw', 'p')}x |"),
    ("explanation/readiness.md", lambda: f"| the same | `2p` | {speed('bfw', '2p')}x |"),
    ("papers/rrfp.md", lambda: f"| `bf` at `2p` | twice 1F1B's | {speed('bf', '2p')}x |"),
    ("papers/rrfp.md", lambda: f"| `bfw` at `p` | 1F1B's | {speed('bfw', 'p')}x |"),
    ("papers/rrfp.md", lambda: f"| `bfw-depth` at `p` | 1F1B's | {speed('bfw-depth', 'p')}x |"),
    ("papers/rrfp.md", lambda: f"| `bfw` at `2p` | twice 1F1B's | {speed('bfw', '2p')}x |"),
    ("papers/rrfp.md", lambda: f"{slowdown('megatron-1f1b', 'p', 'J3')} for 1F1B, "),
    ("papers/rrfp.md", lambda: f"{slowdown('bf', '2p', 'J3')} for `bf` at `2p`"),
    ("papers/rrfp.md", lambda: f"{slowdown('bfw', '2p', 'J3')} for `bfw` at `2p`"),
    (
        "how-to/imbalanced-pipeline.md",
        lambda: f"`bfw-pieces` at `p` runs at {speed('bfw-pieces', 'p')} times the speed",
    ),
    (
        "how-to/imbalanced-pipeline.md",
        lambda: f"`bfw` at `1.5p` at {speed('bfw', '1.5p')} times",
    ),
    *(
        (page, lambda: f"{speed('bfw', '2p', None, 10)} times")
        for page in ("how-to/move-to-2bw.md", "explanation/one-step-of-delay.md")
    ),
    *(
        (page, lambda: f"{speed('bfw', '2p', 'exact', 10)} times")
        for page in ("how-to/move-to-2bw.md", "explanation/one-step-of-delay.md")
    ),
    (
        "papers/async-2bw.md",
        lambda: (
            f"{speed('bfw', '2p', None, 10)}x flushed, {speed('bfw', '2p', 'exact', 10)}x with two"
        ),
    ),
    *(
        (page, lambda optimizer=optimizer: gap(optimizer))  # type: ignore[misc]
        for page in ("how-to/move-to-2bw.md", "explanation/one-step-of-delay.md")
        for optimizer in ("adam", "muon")
    ),
    *(
        (page, lambda: f"{closed('muon')} of Muon's")
        for page in ("how-to/move-to-2bw.md", "explanation/one-step-of-delay.md")
    ),
    *(
        (page, lambda: f"{closed('adam')} of Adam's")
        for page in ("how-to/move-to-2bw.md", "explanation/one-step-of-delay.md")
    ),
    ("papers/async-2bw.md", lambda: f"{loss('muon', '2bw+ef'):.4f} +- 0.0072 | {closed('muon')} |"),
    ("papers/async-2bw.md", lambda: f"{loss('adam', '2bw+ef'):.4f} +- 0.0425 | {closed('adam')} |"),
    *(
        (
            "how-to/choose-a-limit.md",
            lambda run=run, name=name: (  # type: ignore[misc]
                f"| {name} | {activations(run, 0)} | {activations(run, 3)} |"
            ),
        )
        for run, name in (
            ("Megatron 1F1B", "Megatron 1F1B"),
            ("RRFP bfw p", "`bfw` at `p`"),
            ("RRFP bf 2p", "`bf` at `2p`"),
        )
    ),
    (
        "explanation/bounded-weight-gradients.md",
        lambda: (
            "| messages take no time | "
            + " | ".join(
                hint_speeds(row).split()[0]
                for row in (*(f"`bfw-depth` | `{x}p`" for x in ("", "1.5", "2", "4")), "*floor* |")
            )
            + " |"
        ),
    ),
    (
        "explanation/bounded-weight-gradients.md",
        lambda: (
            "| messages take 0.3 of a forward | "
            + " | ".join(
                hint_speeds(row).split()[1]
                for row in (*(f"`bfw-depth` | `{x}p`" for x in ("", "1.5", "2", "4")), "*floor* |")
            )
            + " |"
        ),
    ),
]


@pytest.mark.parametrize(("page", "quoted"), QUOTED)
def test_a_quoted_number_is_the_measured_one(page: str, quoted: Callable[[], str]) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert quoted() in text, f"docs/{page} must say: {quoted()}"
