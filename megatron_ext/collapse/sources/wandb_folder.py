"""Losses from an offline wandb run: its ``.wandb`` file of framed protocol buffers.

The frames are those of LevelDB's log: blocks of 32 KiB, in each records behind a header of
checksum, length and kind; one that does not fit goes on in the next block.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_ext.collapse.history import RawHistory
from megatron_ext.collapse.sources.options import SourceOptions
from megatron_ext.collapse.sources.series import Series, from_series
from megatron_ext.errors import UsageError

_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
_FILE_HEADER = struct.Struct("<4sHB")
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def find_wandb_file(path: Path) -> Path | None:
    """The ``.wandb`` file that `path` is or that lies in it, directly or one run deep.

    Raises:
        UsageError: There are several.
    """
    if path.is_file():
        return path if path.suffix == ".wandb" else None
    found = sorted(path.glob("*.wandb")) or sorted(path.glob("*run-*/*.wandb"))
    found = found or sorted(path.glob("wandb/*run-*/*.wandb"))
    # wandb keeps a link to the latest run beside the runs.
    found = [each for each in found if not each.parent.is_symlink()] or found
    if len(found) > 1:
        runs = ", ".join(each.parent.name for each in found[:5])
        raise UsageError(f"{path}: holds {len(found)} runs ({runs}): give one of them")
    return found[0] if found else None


def read_wandb(path: Path, options: SourceOptions) -> RawHistory:
    """Read the history of an offline run.

    A file that ends in the middle of a record, as after a crash, is read up to there.

    Args:
        path: the ``.wandb`` file.
        options: what the user wants of it.

    Raises:
        UsageError: wandb is not installed, this is no such file, or it has no such metric.
    """
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto import wandb_internal_pb2 as messages
    except ImportError:
        raise UsageError(f"{path}: to read wandb's files: pip install wandb") from None
    points: dict[str, tuple[list[float], list[float]]] = {}
    metadata: dict[str, str] = {}
    notes: list[str] = []
    ended = False
    with path.open("rb") as file:
        records = _Records(file, str(path))
        for count, data in enumerate(records):
            try:
                record = messages.Record.FromString(data)
            except DecodeError:
                records.damage = f"record {count + 1} is damaged"
                break
            kind = record.WhichOneof("record_type")
            if kind == "run":
                _read_config(record.run.config.update, metadata)
            elif kind == "config":
                _read_config(record.config.update, metadata)
            elif kind == "history":
                _read_history(record.history.item, points)
            elif kind == "exit":
                ended = True
        if records.damage:
            notes.append(f"{records.damage}: read up to there")
        elif not ended:
            notes.append("the run has not ended, or its file is cut off: read up to there")
    if not points:
        detail = f" ({notes[0]})" if notes else ""
        raise UsageError(f"{path}: holds no metrics{detail}")
    metrics: dict[str, Series] = {
        name: (np.array(steps), np.array(values)) for name, (steps, values) in points.items()
    }
    return from_series(str(path), metrics, options, metadata, tuple(notes))


class _Records:
    """The records of a file, as far as they are whole."""

    def __init__(self, file: BinaryIO, source: str) -> None:
        self._file = file
        self.damage = ""
        """What is wrong with the rest of the file, if anything."""
        head = file.read(_FILE_HEADER.size)
        if len(head) < _FILE_HEADER.size or _FILE_HEADER.unpack(head)[0] != b":W&B":
            raise UsageError(f"{source}: is no .wandb file, or an empty one")

    def __iter__(self) -> Iterator[bytes]:
        position, record = _FILE_HEADER.size, b""
        while True:
            left = _BLOCK_BYTES - position % _BLOCK_BYTES
            if left < _HEADER.size:  # too little for a header: padding
                self._file.read(left)
                position += left
            head = self._file.read(_HEADER.size)
            if not head:
                if record:
                    self.damage = "the file ends in the middle of a record"
                return
            if len(head) < _HEADER.size:
                self.damage = "the file ends in the middle of a header"
                return
            checksum, length, kind = _HEADER.unpack(head)
            data = self._file.read(length)
            position += _HEADER.size + len(data)
            if len(data) < length:
                self.damage = "the file ends in the middle of a record"
                return
            if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
                self.damage = f"a record of unknown kind {kind} at byte {position}"
                return
            if zlib.crc32(bytes([kind]) + data) != checksum:
                self.damage = f"a wrong checksum before byte {position}"
                return
            record = data if kind in (_WHOLE, _FIRST) else record + data
            if kind in (_WHOLE, _LAST):
                yield record
                record = b""


def _read_history(items: Any, points: dict[str, tuple[list[float], list[float]]]) -> None:
    """Add one history record; metrics that are no numbers are passed over."""
    values: dict[str, float] = {}
    for item in items:
        name = item.key or "/".join(item.nested_key)
        try:
            value = json.loads(item.value_json)  # also NaN and Infinity
        except (ValueError, RecursionError):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(
                value if isinstance(value, str) else ""
            )
        if value is not None:
            values[name] = float(value)
    step = values.get("_step")
    if step is None or not math.isfinite(step):
        return
    for name, value in values.items():
        if not name.startswith("_"):
            steps, theirs = points.setdefault(name, ([], []))
            steps.append(step)
            theirs.append(value)


def _read_config(updates: Any, metadata: dict[str, str]) -> None:
    for item in updates:
        try:
            value = json.loads(item.value_json)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str | int | float):
            metadata[item.key or "/".join(item.nested_key)] = str(value)
