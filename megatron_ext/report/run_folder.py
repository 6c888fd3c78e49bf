"""What a run left behind: its traces, its losses, references for them, and what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.collapse.curve_file import is_curve_file
from megatron_ext.collapse.history import History
from megatron_ext.collapse.sources import SourceOptions, read_history
from megatron_ext.collapse.sources.tensorboard import is_tensorboard
from megatron_ext.errors import UsageError
from megatron_ext.pipeline.trace_window import FILE_PATTERN

_DEEPEST = 3
_MOST_ENTRIES = 5000
_LOG_NAMES = (".log", ".out", ".txt")
_TABLE_NAMES = (".csv", ".tsv", ".jsonl")


@dataclass
class RunFolder:
    """Where the parts of a run lie."""

    path: Path
    traces: Path | None = None
    losses: History | None = None
    curves: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was found and could not be used."""


def find_run(path: Path, column: str | None = None) -> RunFolder:
    """Look for what a run left in a directory and up to three levels below.

    Args:
        path: The directory given to --rrfp-trace, or one that it lies in.
        column: Which loss to read; None to guess.

    Raises:
        UsageError: It is no directory, or holds the traces of several runs in several places.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is no directory; give the one that --rrfp-trace named, or one that holds it"
        )
    found = RunFolder(path)
    entries = _entries(path, found.notes)
    traces = [folder for folder in entries.folders if any(folder.glob(FILE_PATTERN))]
    if len(traces) > 1:
        names = ", ".join(str(folder) for folder in traces[:5])
        raise UsageError(f"{path} holds the traces of {len(traces)} runs ({names}): give one")
    found.traces = traces[0] if traces else None
    found.curves = [file for file in entries.files if file.suffix == ".json" and _is_curve(file)]
    _read_losses(found, entries, column)
    return found


def follow_command(found: RunFolder, command: Sequence[str], column: str | None = None) -> None:
    """Look where the run's own flags say, for what its directory does not hold."""
    if found.losses is None:
        for flag in ("--tensorboard-dir", "--wandb-save-dir"):
            for name in _values(command, flag)[:1]:
                folder = Path(name)
                if found.losses is None and folder.is_dir():
                    _read_losses(found, _entries(folder, found.notes), column)
    if not found.curves:
        for name in _values(command, "--collapse-reference"):
            if _is_curve(Path(name)):
                found.curves.append(Path(name))


@dataclass
class _Entries:
    folders: list[Path]
    files: list[Path]


def _entries(path: Path, notes: list[str]) -> _Entries:
    """Folders and files, those nearer to the top first, and each level by name."""
    found = _Entries([path], [])
    level = [path]
    for _ in range(_DEEPEST + 1):
        below: list[Path] = []
        for folder in level:
            for entry in _listed(folder):
                if entry.is_dir() and not entry.is_symlink():
                    below.append(entry)
                elif entry.is_file():
                    found.files.append(entry)
                if len(found.files) + len(found.folders) > _MOST_ENTRIES:
                    notes.append(f"{path} holds many files: only the first are looked at")
                    return found
        found.folders += below
        level = below
    return found


def _listed(folder: Path) -> Iterator[Path]:
    try:
        yield from (Path(entry.path) for entry in sorted(os.scandir(folder), key=lambda e: e.name))
    except OSError:
        return


def _is_curve(path: Path) -> bool:
    try:
        return is_curve_file(path)
    except (OSError, ValueError):
        return False


def _read_losses(found: RunFolder, entries: _Entries, column: str | None) -> None:
    """Read the first source that holds a loss: a log, wandb's file, TensorBoard's, a table."""

    def ends(names: tuple[str, ...]) -> Callable[[Path], bool]:
        return lambda path: path.suffix in names

    sources: list[Path] = []
    sources += filter(ends(_LOG_NAMES), entries.files)
    sources += filter(ends((".wandb",)), entries.files)
    sources += filter(is_tensorboard, entries.folders)
    sources += filter(ends(_TABLE_NAMES), entries.files)
    reasons = []
    for source in sources:
        try:
            found.losses = read_history(str(source), SourceOptions(column))
            return
        except UsageError as error:
            reasons.append(str(error))
    # A log without a loss is only worth a word where nothing else has one.
    found.notes += reasons[:3]


def _values(command: Sequence[str], flag: str) -> list[str]:
    """The values of a flag in a command line; the last occurrence counts."""
    values: list[str] = []
    for index, word in enumerate(command):
        if word.startswith(f"{flag}="):
            values = [word.partition("=")[2]]
        elif word == flag:
            values = []
            for value in command[index + 1 :]:
                if value.startswith("--"):
                    break
                values.append(value)
    return values
