"""The code blocks of README and docs, and how each of them is tested.

A ``bash`` block is run if all its commands are ``megatron-ext``, and a ``python`` block always. A
block that is not run says why, in a comment above it:

    <!-- not run: it needs 8 GPUs -->

Its commands are checked all the same: flags by the program's own parsers, and Megatron's by
Megatron's; scripts by the flags that they define. ``<!-- save as: FILE -->`` above a block puts it
into a file for the other blocks of that page.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]

PROGRAM = "megatron-ext"

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<reason>(?:(?!-->).)*?) -->\n)?"
    r"^```(?P<language>bash|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        place: page and line.
        language: bash or python.
        text: what is in it.
        not_run: why it is not run; empty if it is.
        save_as: name of the file it is put into; empty for none.
    """

    place: str
    language: str
    text: str
    not_run: str
    save_as: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command; comments are left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    @property
    def runnable(self) -> bool:
        """Whether all of it can be run here."""
        if self.language == "python":
            return True
        return all(without_environment(words)[0] == PROGRAM for words in self.commands)


def blocks(page: Path) -> list[Block]:
    """The bash and python blocks of a page, in order."""
    source = page.read_text()
    name = page.relative_to(REPOSITORY)
    found = []
    for match in _BLOCK.finditer(source):
        line = source.count("\n", 0, match.start("text"))
        marks = {match["mark"]: " ".join((match["reason"] or "").split())}
        found.append(
            Block(
                f"{name}:{line}",
                match["language"],
                match["text"],
                marks.get("not run", ""),
                marks.get("save as", ""),
            )
        )
    return found


def without_environment(words: list[str]) -> list[str]:
    """A command without the variables that are set in front of it."""
    rest = list(words)
    while len(rest) > 1 and _ASSIGNMENT.match(rest[0]):
        del rest[0]
    return rest
