"""The timeline of a run: a static picture, and the data for the one that the script draws."""

from __future__ import annotations

import base64
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ext.pipeline.task import Kind
from megatron_ext.report.blocks import Picture, Timeline
from megatron_ext.report.idle import StageTime
from megatron_ext.report.run import Run
from megatron_ext.report.svg import WIDTH, Drawing, ticks
from megatron_ext.simulate.outcome import Cause
from megatron_ext.simulate.rank_trace import RankTrace

MOST_TASKS = 500_000
"""The page holds the first iterations with so many tasks; Perfetto shows the rest."""
MOST_ROWS = 64
_MOST_DRAWN = 3000
_LEFT = 90
_IDLE = 8  # the script's first kind of idle time

CAUSE_NAMES = {
    Cause.FILL: "fill",
    Cause.FORWARD: "waits for an activation",
    Cause.BACKWARD: "waits for a gradient",
    Cause.MEMORY: "waits at the live limit",
    Cause.AGREEMENT: "between tasks",
    Cause.MESSAGE: "sends",
    Cause.UPDATE: "update, between iterations",
    Cause.DRAIN: "drain",
}
KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "weight gradient",
    Kind.UPDATE: "update",
}
_REDUCE = 4
KEYS = (
    ("k-forward", "forward"),
    ("k-backward", "backward"),
    ("k-weight", "weight gradient"),
    ("k-update", "update"),
    ("k-reduce", "gradient reduction"),
    *((f"c-{cause.name.lower()}", f"idle: {CAUSE_NAMES[cause]}") for cause in Cause
      if cause is not Cause.MESSAGE),
    ("k-live", "activations held, below the tasks; the line is the limit"),
)  # fmt: skip
_COLOURS = {
    0: "--forward", 1: "--backward", 2: "--weight", 3: "--update", _REDUCE: "--reduce",
    _IDLE + Cause.FILL: "--fill", _IDLE + Cause.FORWARD: "--await-forward",
    _IDLE + Cause.BACKWARD: "--await-backward", _IDLE + Cause.MEMORY: "--memory",
    _IDLE + Cause.AGREEMENT: "--agreement", _IDLE + Cause.MESSAGE: "--message",
    _IDLE + Cause.UPDATE: "--idle-update", _IDLE + Cause.DRAIN: "--drain",
}  # fmt: skip
HELP = (
    "Drag, or use the arrow keys, to move; + and -, a pinch, or the wheel with Ctrl, to zoom; "
    "Home, End and 0 for the start, the end and all. Up and down choose a stage, n and p go from "
    "task to task, Enter zooms to it, Esc lets it go."
)


def timeline(run: Run, name: str, heading: str = "") -> Timeline:
    """The timeline of a run.

    Args:
        run: With traces.
        name: Id of the element, unique on the page.
        heading: Above it.
    """
    rows = list(zip(run.ranks, run.times, strict=True))[:MOST_ROWS]
    last = _last_iteration(run)
    begin = min(rank.batches[run.iterations[0]][0] for rank, _ in rows)
    end = max(rank.batches[last][1] for rank, _ in rows)
    shown = [number for number in run.iterations if number <= last]
    note = ""
    if last < run.iterations[-1]:
        note = f" Of the traced iterations, {shown[0]} to {last} are on this page."
    if len(run.ranks) > MOST_ROWS:
        note += f" The first {MOST_ROWS} of {len(run.ranks)} ranks are shown."
    count = sum(len(rank.tasks[number]) for rank, _ in rows for number in shown)
    label = (
        f"Timeline of {run.name}: {len(rows)} rows, {count:,} tasks, iterations {shown[0]} to "
        f"{last}."
    )
    data = {
        "label": label,
        "help": HELP,
        "end": _microseconds(end - begin),
        "kinds": {number: (_kind_name(number), colour) for number, colour in _COLOURS.items()},
        "batches": [_batch(run, number, begin) for number in shown],
        "rows": [_row(run, rank, time, begin, end) for rank, time in rows],
    }
    picture = _static(run, rows, shown, note)
    return Timeline(name, label, picture, heading, script_json(data))


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _last_iteration(run: Run) -> int:
    """The last iteration that the page has room for."""
    room = MOST_TASKS
    last = run.iterations[0]
    for number in run.iterations:
        room -= sum(len(rank.tasks[number]) for rank in run.ranks[:MOST_ROWS])
        if room < 0 and number != run.iterations[0]:
            break
        last = number
    return last


def _kind_name(number: int) -> str:
    if number >= _IDLE:
        return CAUSE_NAMES[Cause(number - _IDLE)]
    return "gradient reduction" if number == _REDUCE else KIND_NAMES[Kind(number)]


def _batch(run: Run, iteration: int, begin: float) -> tuple[int, int, int]:
    spans = [rank.batches[iteration] for rank in run.ranks]
    start, end = min(start for start, _ in spans), max(end for _, end in spans)
    return iteration, _microseconds(start - begin), _microseconds(end - begin)


def _row(run: Run, rank: RankTrace, time: StageTime, begin: float, end: float) -> dict[str, Any]:
    """What the script needs of one rank; numbers as base64 of little-endian arrays."""
    items: list[tuple[float, float, int, int, int, int]] = []
    for iteration, tasks in rank.tasks.items():
        details = rank.details[iteration]
        first, size = rank.first_microbatch(iteration), int(details.get("microbatches", 0))
        for one in tasks:
            kind, microbatch, chunk = one.task
            is_next = bool(size) and microbatch >= first + size
            number = microbatch - first - (size if is_next else 0)
            items.append((one.started, one.ended, kind, max(number, 0), chunk, iteration + is_next))
    items += [(start, stop, Kind.UPDATE, 0, 0, 0) for start, stop in rank.updates]
    items += [(start, stop, _REDUCE, 0, 0, 0) for start, stop in rank.reductions]
    drawn = sorted([*rank.reductions, *rank.updates])
    # Reductions lie within times that count as idle, and are drawn over them.
    items += [
        (start, stop, _IDLE + cause, 0, 0, 0)
        for interval in time.intervals
        for start, stop, cause in _without(interval, drawn)
    ]
    items = sorted(item for item in items if begin <= item[0] <= end)
    live = [(at, value) for at, value in rank.live if begin <= at <= end]
    return {
        "label": run.label(rank),
        "limit": run.live_limit(rank),
        "starts": _encoded("I", (_microseconds(item[0] - begin) for item in items)),
        "lengths": _encoded("I", (_microseconds(item[1] - item[0]) for item in items)),
        "kinds": _encoded("B", (item[2] for item in items)),
        "microbatches": _encoded("I", (item[3] for item in items)),
        "chunks": _encoded("B", (min(item[4], 255) for item in items)),
        "iterations": _encoded("I", (item[5] for item in items)),
        "live_at": _encoded("I", (_microseconds(at - begin) for at, _ in live)),
        "live": _encoded("H", (min(value, 65535) for _, value in live)),
    }


def _without(
    interval: tuple[float, float, Cause], drawn: list[tuple[float, float]]
) -> Iterable[tuple[float, float, Cause]]:
    """An idle time less what is drawn as an update or a reduction."""
    start, end, cause = interval
    if cause not in (Cause.UPDATE, Cause.DRAIN):
        return [interval]
    parts = []
    first = max(bisect_left(drawn, (start,)) - 1, 0)
    for begun, stopped in drawn[first : bisect_left(drawn, (end,))]:
        if begun < end and start < stopped:
            if begun > start:
                parts.append((start, begun, cause))
            start = max(start, stopped)
    if start < end:
        parts.append((start, end, cause))
    return parts


def _microseconds(milliseconds: float) -> int:
    return min(max(round(milliseconds * 1e3), 0), 2**32 - 1)


def _encoded(code: str, values: Iterable[int]) -> str:
    numbers = array(code, values)
    return base64.b64encode(numbers.tobytes()).decode()


def _static(
    run: Run, rows: Sequence[tuple[RankTrace, StageTime]], shown: Sequence[int], note: str
) -> Picture:
    """As many of the first iterations as can be drawn task by task, at least one."""
    last = shown[0]
    count = 0
    for number in shown:
        count += sum(len(rank.tasks[number]) for rank, _ in rows)
        if count > _MOST_DRAWN and number != shown[0]:
            break
        last = number
    begin = min(rank.batches[shown[0]][0] for rank, _ in rows)
    end = max(rank.batches[last][1] for rank, _ in rows)
    step = 30 if len(rows) <= 32 else 14
    which = f"iteration {last}" if last == shown[0] else f"iterations {shown[0]} to {last}"
    caption = f"Tasks of every stage of {run.name}, {which}.{note}"
    drawing = Drawing(step * len(rows) + 40, caption)
    scale = (WIDTH - _LEFT - 8) / max(end - begin, 1e-9)
    for row, (rank, time) in enumerate(rows):
        y = row * step + 2
        _draw_row(drawing, run, rank, time, y, step, begin, end, scale)
    bottom = step * len(rows) + 6
    for value in ticks(0.0, end - begin, 8):
        x = _LEFT + value * scale
        drawing.path(f"M{x:.1f} {bottom}v5", "axis")
        drawing.text(x, bottom + 18, f"{value:g}", "soft", "middle")
    drawing.text(WIDTH - 8, bottom + 32, "ms", "soft", "end")
    return Picture(drawing.done(), caption, KEYS)


def _draw_row(
    drawing: Drawing,
    run: Run,
    rank: RankTrace,
    time: StageTime,
    y: float,
    step: float,
    begin: float,
    end: float,
    scale: float,
) -> None:
    height = step - 12 if step > 20 else step - 3
    drawing.boxes([(_LEFT, y, WIDTH - _LEFT - 8, height)], "lane")
    drawing.text(_LEFT - 6, y + height / 2 + 4, run.label(rank)[:16], anchor="end")

    def boxes(
        spans: Iterable[tuple[float, float]], inset: float = 0.0
    ) -> list[tuple[float, float, float, float]]:
        """Boxes of spans; those narrower than a third of a pixel are joined to the one before."""
        found: list[tuple[float, float, float, float]] = []
        for start, stop in spans:
            if start < begin or start > end:
                continue
            x, width = _LEFT + (start - begin) * scale, (min(stop, end) - start) * scale
            if found and width < 0.3 and x - found[-1][0] - found[-1][2] < 0.3:
                before = found[-1]
                found[-1] = (before[0], before[1], x + width - before[0], before[3])
            else:
                found.append((x, y + inset, width, height - 2 * inset))
        return found

    for cause in Cause:
        spans = [(start, stop) for start, stop, why in time.intervals if why is cause]
        drawing.boxes(boxes(spans, height * 0.3), f"c-{cause.name.lower()}")
    drawing.boxes(boxes(rank.reductions), "k-reduce")
    drawing.boxes(boxes(rank.updates), "k-update")
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT):
        mine = [one for one in rank.all_tasks if one.task.kind is kind]
        drawing.boxes(boxes((one.started, one.ended) for one in mine), f"k-{kind.name.lower()}")
    if step > 20:
        _draw_live(drawing, run, rank, y + height + 1, 9, begin, end, scale)


def _draw_live(
    drawing: Drawing,
    run: Run,
    rank: RankTrace,
    y: float,
    height: float,
    begin: float,
    end: float,
    scale: float,
) -> None:
    """Activations held, as steps from the row's lower edge up, and the limit as a line."""
    limit = run.live_limit(rank)
    most = max([limit or 0, rank.peak_live, 1])
    values = [(at, value) for at, value in rank.live if begin <= at <= end]
    data = [f"M{_LEFT} {y + height:.1f}"]
    for at, value in values:
        data.append(f"H{_LEFT + (at - begin) * scale:.1f}V{y + height - height * value / most:.1f}")
    data.append(f"H{_LEFT + (end - begin) * scale:.1f}V{y + height:.1f}z")
    if values:
        drawing.path("".join(data), "k-live")
    if limit:
        drawing.path(f"M{_LEFT} {y + height - height * limit / most:.1f}H{WIDTH - 8}", "limit")
