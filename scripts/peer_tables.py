"""What `bench_peers.py` measured, as tables: on the console, and in Markdown for docs/peers.md."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]


def conditions(records: list[Record]) -> list[tuple[float, str]]:
    """All (sigma, level) in order."""
    return list(dict.fromkeys((record["sigma"], record["jitter"]) for record in records))


def _title(condition: tuple[float, str]) -> str:
    sigma, level = condition
    return f"{level}, sigma {sigma:g}" if sigma else level


def _spread(record: Record, name: str) -> str:
    middle, low, high = record[name], record[f"{name}_min"], record[f"{name}_max"]
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def _by_policy(records: list[Record]) -> dict[str, dict[tuple[float, str], Record]]:
    rows: dict[str, dict[tuple[float, str], Record]] = {}
    for record in records:
        rows.setdefault(record["policy"], {})[record["sigma"], record["jitter"]] = record
    return rows


def show(records: list[Record], console: Console) -> None:
    """Print one table per condition."""
    for condition in conditions(records):
        table = Table(title=f"{_title(condition)}; median (min to max) over the seeds")
        for column in (
            "schedule",
            "makespan (ms)",
            "speedup over Megatron 1F1B",
            "of the floor",
            "peak live",
            "ideal (ms)",
            "takes as long as RRFP at equal memory",
        ):
            table.add_column(column, justify="left" if column == "schedule" else "right")
        for record in records:
            if (record["sigma"], record["jitter"]) != condition:
                continue
            equal = record["ours_at_equal_memory"].values()
            table.add_row(
                record["policy"],
                f"{record['makespan_s'] * 1e3:.0f}",
                _spread(record, "speedup"),
                f"{record['floor_ratio']:.1%}",
                f"{record['peak_live']:g}",
                f"{record['ideal_s'] * 1e3:.0f}",
                ", ".join(f"{one['median']:.2f}x" for one in equal),
            )
        console.print(table)


def markdown(run: dict[str, Any]) -> str:
    """The tables of docs/peers.md.

    Raises:
        KeyError: `run` was not written by `bench_peers.py`.
    """
    settings, machine, records = run["settings"], run["machine"], run["results"]
    order, rows = conditions(records), _by_policy(records)
    lines = [
        f"{settings['stages']} stages, {settings['microbatches']} microbatches, forwards of "
        f"{settings['forward_ms']:g} ms and backwards of {settings['backward_ms']:g} ms, "
        f"{settings['seeds']} rounds; {machine['cores']} cores, PyTorch {machine['torch']}, "
        f"{machine['date']}. Speed relative to Megatron's 1F1B under the same condition: median "
        "(least to most).",
        "",
        "| | " + " | ".join(_title(one) for one in order) + " | of the floor | peak live |",
        "| --- |" + " ---: |" * (len(order) + 2),
    ]
    for name, row in rows.items():
        cells = [_spread(row[one], "speedup") for one in order]
        first = row[order[0]]
        cells += [f"{first['floor_ratio']:.1%}", f"{first['peak_live']:g}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "How many times as long each takes as RRFP with no more memory (above 1: RRFP is ahead):",
        "",
        "| | beside | " + " | ".join(_title(one) for one in order) + " |",
        "| --- | --- |" + " ---: |" * len(order),
    ]
    behind = []
    for name, row in rows.items():
        for ours in row[order[0]]["ours_at_equal_memory"]:
            ratios = {one: row[one]["ours_at_equal_memory"][ours] for one in order}
            cells = [
                "{median:.2f}x ({min:.2f}-{max:.2f})".format(**ratio) for ratio in ratios.values()
            ]
            lines.append(f"| {name} | {ours} | " + " | ".join(cells) + " |")
            behind += [
                f"- {ours} is behind {name} under {_title(one)} ({ratio['median']:.2f}x)"
                for one, ratio in ratios.items()
                if ratio["median"] < 1
            ]
    lines += [
        "",
        *(behind or ["RRFP is behind nowhere."]),
        "",
        "The same times without messages and overhead, simulated, in ms: what each order itself "
        "can reach.",
        "",
        "| | " + " | ".join(_title(one) for one in order) + " |",
        "| --- |" + " ---: |" * len(order),
    ]
    for name, row in rows.items():
        cells = [f"{row[one]['ideal_s'] * 1e3:.0f}" for one in order]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    floors = [f"{rows[name][one]['floor_s'] * 1e3:.0f}" for one in order]
    lines.append("| the busiest rank's work | " + " | ".join(floors) + " |")
    return "\n".join(lines)
