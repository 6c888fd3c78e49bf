"""Every message that the troubleshooting page quotes is one that the program says."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.examples import REPOSITORY

PAGE = REPOSITORY / "docs" / "how-to" / "troubleshooting.md"
THEIRS = "## Megatron's own messages"

_MESSAGE = re.compile(r"^\*\*`([^`]+)`\*\*", re.MULTILINE)
_HOLE = "\0"
_SHORTEST = 3


def messages(text: str) -> list[str]:
    return [" ".join(message.split()) for message in _MESSAGE.findall(text)]


def python_texts(source: str) -> list[str]:
    """All strings of a file, with a hole where a value is put in."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else _HOLE for part in node.values
            ]
            texts.append("".join(str(part) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the program can say."""
    texts = []
    for folder in ("megatron_ext", "scripts"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            texts += python_texts(path.read_text())
        for path in sorted((REPOSITORY / folder).rglob("*.sh")):
            # A line that goes on is one text of two words.
            texts.append(re.sub(r'"\s*\\\n\s*"', " ", path.read_text()))
    return texts


def unsaid(message: str, said: list[str]) -> list[str]:
    """The parts of a message, between its dots, that the program does not say."""
    parts = [part.strip() for part in message.split("...")]
    parts = [part for part in parts if len(part) >= _SHORTEST]
    assert parts, f"{message!r} quotes nothing"
    return [part for part in parts if not _is_said(part, said)]


def _is_said(part: str, said: list[str]) -> bool:
    """Whether one text holds it, or two do that are put together at a space."""
    if any(part in text for text in said):
        return True
    gaps = [gap.start() for gap in re.finditer(" ", part)]
    halves = [(part[:gap], part[gap + 1 :]) for gap in gaps]
    return any(
        min(len(first), len(second)) >= 10
        and all(any(h in t for t in said) for h in (first, second))
        for first, second in halves
    )


def test_every_message_is_said_by_the_program(said: list[str]) -> None:
    ours = messages(PAGE.read_text().split(THEIRS)[0])
    assert len(ours) > 60
    missing = {message: parts for message in ours if (parts := unsaid(message, said))}
    assert not missing


def test_their_messages_are_said_by_megatron() -> None:
    (message, *_) = messages(PAGE.read_text().split(THEIRS)[1])
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "datasets" / "indexed_dataset.py"
    assert not unsaid(message, python_texts(source.read_text()))


def test_a_message_that_nobody_says_is_found(said: list[str]) -> None:
    assert unsaid("no progress for ... minutes (--rrfp-timeout)", said) == [
        "minutes (--rrfp-timeout)"
    ]
    assert unsaid("the hint ... chose nothing at all", said) == ["chose nothing at all"]
