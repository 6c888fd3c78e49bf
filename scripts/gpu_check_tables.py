"""What `gpu_check.py` found, as tables: on the console, and in Markdown for docs/gpu.md."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

THROUGHPUT = (
    ("run", "run"),
    ("processes", "processes"),
    ("ms per iteration", "ms_per_iteration"),
    ("tokens/s", "tokens_per_s"),
    ("memory (GiB)", "memory_gib"),
    ("first loss", "first_loss"),
    ("last loss", "last_loss"),
)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _headline(report: dict[str, Any]) -> str:
    machine = report["machine"]
    gpu = machine["gpu"]
    where = f"{gpu['name']}, driver {gpu['driver']}" if gpu else "no GPU"
    if report["dry_run_cpu"]:
        where = "dry run on the CPU: says nothing about GPUs"
    packages = machine["packages"]
    return (
        f"{report['date']}; {where}; PyTorch {packages['torch']}, CUDA {machine['cuda']}, "
        f"megatron-core {packages['megatron-core']}, megatron_ext {machine['megatron_ext']}; "
        f"{report['seconds']:.0f} s"
    )


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables, that of the checks last."""
    speed = Table(title="all processes of a run share one device")
    for title, _ in THROUGHPUT:
        speed.add_column(title, justify="left" if title == "run" else "right")
    for row in report["throughput"]:
        speed.add_row(*(_cell(row[key]) for _, key in THROUGHPUT))
    if report["throughput"]:
        console.print(speed)
    table = Table(title=_headline(report))
    for title in ("check", "outcome", "s", "found"):
        table.add_column(title, justify="right" if title == "s" else "left", overflow="fold")
    for check in report["checks"]:
        table.add_row(check["name"], check["status"], f"{check['seconds']:.0f}", check["detail"])
    console.print(table)


def markdown(report: dict[str, Any]) -> str:
    """The tables of docs/gpu.md.

    Raises:
        KeyError: `report` was not written by `gpu_check.py`.
    """
    lines = [_headline(report), "", "| check | outcome | found |", "| --- | --- | --- |"]
    lines += [
        f"| {check['name']} | {check['status']} | {check['detail'].replace('|', '/')} |"
        for check in report["checks"]
    ]
    titles = [title for title, _ in THROUGHPUT]
    lines += ["", f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]
    lines += [
        "| " + " | ".join(_cell(row[key]) for _, key in THROUGHPUT) + " |"
        for row in report["throughput"]
    ]
    return "\n".join(lines)
