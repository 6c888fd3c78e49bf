"""Join the traces of a run's ranks into one, on one clock.

A rank that died leaves no file or one that is cut off: what there is gets used, and a warning
says what is missing. Files are read one at a time, since a long trace of many ranks is large.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_ext.errors import UsageError
from megatron_ext.pipeline.trace_window import FILE_PATTERN, FORMAT

_EVENTS = ', "traceEvents": ['


@dataclass
class JoinedTrace:
    """What went into a joined trace."""

    ranks: int = 0
    events: int = 0
    uncertainty_us: float = 0.0
    """The clocks of two ranks are off by no more than twice this."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankFile:
    """The trace of one rank, and what it says of itself in its first line."""

    path: Path
    about: dict[str, Any]

    @property
    def offset_us(self) -> float:
        """What this rank's clock shows more than that of the first rank."""
        return float(self.about["clock offset (us)"])


def join_traces(
    folder: Path, target: Path, *, on_rank: Callable[[int], object] = lambda _: None
) -> JoinedTrace:
    """Write the traces in `folder` to `target` as one.

    Args:
        folder: Where a run's ranks wrote their traces.
        target: The file to write; compressed if its name ends in .gz.
        on_rank: Called with the number of ranks done so far.

    Raises:
        UsageError: `folder` holds no trace or those of several runs, or `target` cannot be
            written.
    """
    joined = JoinedTrace()
    files = rank_files(folder, joined.warnings)
    # The zero of the joined trace; rank clocks count from when a machine was started.
    origin_us = min(file.about["origin (us)"] - file.offset_us for file in files)
    about = {"format": FORMAT, "ranks": {file.about["rank"]: file.about for file in files}}
    try:
        with _opened(target) as output:
            head = json.dumps({"otherData": about, "displayTimeUnit": "ms"})[:-1]
            output.write(head + _EVENTS)
            separator = "\n"
            for file in files:
                shift_us = origin_us + file.offset_us
                for event in rank_events(file.path, joined.warnings):
                    if "ts" in event:
                        event["ts"] = round(event["ts"] - shift_us, 3)
                    output.write(separator + json.dumps(event, separators=(",", ":")))
                    separator = ",\n"
                    joined.events += 1
                joined.ranks += 1
                uncertainty_us = file.about["clock uncertainty (us)"]
                joined.uncertainty_us = max(joined.uncertainty_us, uncertainty_us)
                on_rank(joined.ranks)
            output.write("\n]}\n")
    except OSError as error:
        raise UsageError(f"--trace {target}: cannot write it ({error.strerror})") from None
    return joined


def rank_files(folder: Path, warnings: list[str]) -> list[RankFile]:
    """The traces in `folder`, by rank.

    Args:
        folder: Where a run's ranks wrote their traces.
        warnings: Gets a line for every file that is left out, and for ranks without one.

    Raises:
        UsageError: There are none, or those of several runs.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory; give the one that --rrfp-trace named")
    files = []
    for path in sorted(folder.glob(FILE_PATTERN)):
        about = _about(path)
        if about is None:
            warnings.append(f"{path} is left out: it is no trace of --rrfp-trace")
        else:
            files.append(RankFile(path, about))
    if not files:
        raise UsageError(
            f"{folder} holds no trace (no {FILE_PATTERN} of --rrfp-trace); "
            "give the directory that --rrfp-trace named"
        )
    runs = {file.about["run"]: file.path for file in files}
    if len(runs) > 1:
        paths = [str(path) for path in runs.values()]
        raise UsageError(
            f"{folder} holds traces of {len(runs)} runs ({paths[0]} is of another run than "
            f"{paths[1]}); remove those of one, and trace each run into a directory of its own"
        )
    missing = set(range(files[0].about["world size"])) - {file.about["rank"] for file in files}
    if missing:
        ranks = ", ".join(str(rank) for rank in sorted(missing))
        warnings.append(f"there is no trace of rank {ranks}: it died before it could write one")
    return sorted(files, key=lambda file: int(file.about["rank"]))


def _about(path: Path) -> dict[str, Any] | None:
    """What a rank's file says of itself in its first line; None if it is something else."""
    try:
        with path.open(encoding="utf-8") as file:
            document = json.loads(file.readline().rstrip() + "]}")
        about = document["otherData"]
        return about if about["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rank_events(path: Path, warnings: list[str]) -> Iterator[dict[str, Any]]:
    """The events of a rank's file, up to where it is cut off, of which `warnings` then tells."""
    with path.open(encoding="utf-8", errors="replace") as file:
        file.readline()
        for line in file:
            text = line.strip()
            if text == "]}":
                return
            try:
                yield json.loads(text.removesuffix(","))
            except ValueError:
                break
    warnings.append(f"{path} is cut off: its rank was killed while writing; what is there is used")


@contextlib.contextmanager
def _opened(target: Path) -> Iterator[IO[str]]:
    """`target` for writing; it appears only once it is complete."""
    part = target.with_name(target.name + ".part")
    try:
        opener: Any = gzip.open if target.suffix == ".gz" else open
        with opener(part, "wt", encoding="utf-8") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
