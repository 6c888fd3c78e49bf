"""What a trace says of its run besides what happened: command, settings, how memory is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(^|[-_])(key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryReading:
    """One figure of this process's memory, with its name."""

    name: str
    """What is measured, as shown to the user."""
    read: Callable[[], int | None]
    """Gives it in bytes, None where it cannot be read."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that readers of its traces need."""

    command: tuple[str, ...] = ()
    """The script and its flags, without secrets."""
    settings: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """What the flags came to, such as the hint and the live limit."""
    memory: MemoryReading | None = None
    """Read after every traced batch."""


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """A command line in which the values of flags such as ``--api-key`` are replaced.

    Traces and reports are handed around.
    """
    words: list[str] = []
    hides = False
    for word in command:
        name, equals, _ = word.partition("=")
        is_flag = word.startswith("--")
        if hides and not is_flag:
            words.append(HIDDEN)
            hides = False
            continue
        hides = is_flag and bool(_SECRET.search(name))
        words.append(f"{name}={HIDDEN}" if hides and equals else word)
        hides = hides and not equals
    return tuple(words)
