"""What is in the file of an offline wandb run."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.collapse.sources.wandb_folder import _Records


@dataclass
class WandbRun:
    """A run as wandb would bring it to its server."""

    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    alerts: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False


def read_wandb_run(folder: Path) -> WandbRun:
    """The only run below a folder."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    run = WandbRun()
    with path.open("rb") as file:
        records = _Records(file, str(path))
        for data in records:
            _take(wandb_internal_pb2.Record.FromString(data), run)
        assert not records.damage
    return run


def _take(record: Any, run: WandbRun) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.config |= _items(record.run.config.update)
        run.tags = tuple(record.run.tags)
    elif kind == "config":
        run.config |= _items(record.config.update)
    elif kind == "summary":
        run.summary |= _items(record.summary.update)
    elif kind == "alert":
        run.alerts.append((record.alert.title, record.alert.text))
    elif kind == "exit":
        run.ended = True
    elif kind == "history":
        values = _items(record.history.item)
        for name, value in values.items():
            if not name.startswith("_"):
                run.scalars[name].append((values["_step"], value))


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
