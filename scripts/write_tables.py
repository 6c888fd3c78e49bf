"""Write the measured tables in README and docs from docs/data, so that no number is typed by hand.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is a key of
`TABLES`. After a benchmark has written its JSON file:

    python scripts/write_tables.py            # rewrite the tables
    python scripts/write_tables.py --check    # only say whether they are what the data says
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "docs" / "data"
PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "docs" / "benchmarks.md",
    REPOSITORY / "docs" / "convergence.md",
)
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)

Record = dict[str, Any]


def load(name: str) -> Any:
    """What a benchmark wrote into docs/data."""
    return json.loads((DATA / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


# Schedules


def schedule_name(record: Record) -> str:
    """As in all tables of schedules."""
    if record["hint"] == "megatron-1f1b":
        return "Megatron 1F1B"
    name = f"`{record['hint']}` at `{record['live_limit']}`"
    return name + (f" + 2BW, clip `{record['clip']}`" if record.get("clip") else "")


def schedules(records: list[Record], only: Callable[[Record], bool] = lambda _: True) -> str:
    """Speed and share of the floor of every schedule, at both sigmas."""
    by_name: dict[str, dict[float, Record]] = {}
    for record in filter(only, records):
        by_name.setdefault(schedule_name(record), {})[record["sigma"]] = record
    rows = []
    for name, by_sigma in by_name.items():
        row = [name]
        for sigma in (0.0, 0.3):
            one = by_sigma[sigma]
            row.append(f"{one['speedup']:.2f}x ({one['speedup_min']:.2f}-{one['speedup_max']:.2f})")
            row.append(f"{one['floor_ratio']:.1%}")
        decision = by_sigma[0.3]["dispatch_us"]
        row += [
            str(max(one["peak_live"] for one in by_sigma.values())),
            "" if decision is None else f"{decision:.1f}",
        ]
        rows.append(row)
    head = ["", "sigma 0", "of the floor", "sigma 0.3", "of the floor", "peak live"]
    return table([*head, "decision (us)"], rows)


def one_batch(record: Record) -> bool:
    """Whether a record is of a single batch, without an optimizer step."""
    return bool(record["iterations"] == 1)


def in_readme(record: Record) -> bool:
    """Whether the README shows the schedule."""
    shown = {
        ("megatron-1f1b", "p", None),
        ("bf", "2p", None),
        ("bfw", "p", None),
        ("bfw-depth", "p", None),
        ("bfw-pieces", "p", None),
        ("bfw", "2p", None),
        ("bfw", "2p", "exact"),
        ("bfw-pieces", "2p", "exact"),
    }
    return (record["hint"], record["live_limit"], record["clip"]) in shown


def delays() -> str:
    """Slowdown by injected delays, and speed at each level, beside the paper's Table 6."""
    levels = ("J0", "J1", "J2", "J3")
    by_name: dict[str, dict[str, Record]] = {}
    for record in load("bench_jitter")["results"]:
        by_name.setdefault(schedule_name(record), {})[record["jitter"]] = record
    rows = [
        [
            name,
            *(f"{one[level]['slowdown']:.1%}" for level in levels[1:]),
            *(f"{one[level]['speedup']:.2f}x" for level in levels),
        ]
        for name, one in by_name.items()
    ]
    rows += [
        ["RRFP paper, Table 6: 1F1B", "2.8%", "11.3%", "18.1%", *[""] * 4],
        ["RRFP paper, Table 6: BF, 32 in flight", "1.8%", "6.8%", "11.4%", *[""] * 4],
    ]
    return table(["", "J1", "J2", "J3", "speedup at J0", "J1", "J2", "J3"], rows)


# Convergence


class Convergence:
    """What one step of delay costs, from `bench_convergence.py`."""

    def __init__(self) -> None:
        found = load("convergence")
        self.results, self.series = found["results"], found["series"]
        self.optimizers = list(dict.fromkeys(one["optimizer"] for one in self.results))
        rates = {one["optimizer"]: one["learning_rate"] for one in self.results}
        self.first_seed = {
            (one["optimizer"], one["mode"]): one["val_loss"]
            for one in self.series["learning rate"]
            if one["learning_rate"] == rates[one["optimizer"]]
        }

    def closed(self, optimizer: str, loss: float) -> str:
        """What part of the gap is closed, in runs of the first seed at the best rate."""
        return _closed(*(self.first_seed[optimizer, mode] for mode in ("sync", "2bw")), loss)

    def means(self) -> str:
        """Means over the seeds."""
        rows = []
        for name in self.optimizers:
            modes = {one["mode"]: one for one in self.results if one["optimizer"] == name}
            sync, late, fed = (modes[mode]["val_loss"] for mode in ("sync", "2bw", "2bw+ef"))
            rows.append(
                [
                    f"{name} {modes['sync']['learning_rate']:g}",
                    *(f"{one['val_loss']:.4f} +- {one['std']:.4f}" for one in modes.values()),
                    f"{late - sync:.3f}",
                    _closed(sync, late, fed),
                ]
            )
        return table(_head("optimizer, peak learning rate"), rows)

    def against(self, key: str, what: str) -> str:
        """One seed, against a setting."""
        rows = []
        records = self.series[what]
        for name, value in sorted({(one["optimizer"], one[key]) for one in records}):
            losses = {
                one["mode"]: one["val_loss"]
                for one in records
                if (one["optimizer"], one[key]) == (name, value)
            }
            sync, late, fed = (losses[mode] for mode in ("sync", "2bw", "2bw+ef"))
            rows.append(
                [
                    f"{name} {value:g}",
                    *(f"{loss:.4f}" for loss in (sync, late, fed)),
                    f"{late - sync:.3f}",
                    _closed(sync, late, fed),
                ]
            )
        return table(_head(f"optimizer, {what}"), rows)

    def variants(self, series: str, columns: tuple[float, ...], label: str) -> str:
        """Of a series: a row per optimizer and variant, columns by coefficient."""
        by_row: dict[str, dict[float, Record]] = {}
        for one in self.series[series]:
            variant = f"{float(one['start']):.0%}"
            if one["end"] is not None:
                variant += f" and {1 - float(one['end']):.0%}"
            by_row.setdefault(f"{one['optimizer']} {variant}", {})[one["error_feedback"]] = one
        rows = []
        for name, by_coefficient in by_row.items():
            row = [name]
            for coefficient in columns:
                one = by_coefficient[coefficient]
                row += [f"{one['val_loss']:.4f}", self.closed(one["optimizer"], one["val_loss"])]
            rows.append(row)
        head = [f"optimizer, {label}"]
        for coefficient in columns:
            head += [f"lambda {coefficient:g}" if coefficient else "one step late", "closed"]
        return table(head, rows)

    def coefficients(self, series: str) -> str:
        """Loss against the coefficient of error feedback."""
        rows = []
        for name in self.optimizers:
            losses = {
                one["error_feedback"]: one["val_loss"]
                for one in self.series[series]
                if one["optimizer"] == name
            }
            if series == "coefficient":
                losses[0.0] = self.first_seed[name, "2bw"]
                losses[1.0] = self.first_seed[name, "2bw+ef"]
            rows += [
                [name, f"{coefficient:g}", f"{loss:.4f}", self.closed(name, loss)]
                for coefficient, loss in sorted(losses.items())
            ]
        return table(["optimizer", "lambda", "loss", "closed"], rows)


def _head(first: str) -> list[str]:
    return [first, "synchronous", "one step late", "+ error feedback", "gap", "gap closed"]


def _closed(sync: float, late: float, loss: float) -> str:
    return f"{1 - (loss - sync) / (late - sync):.0%}"


TABLES: dict[str, Callable[[], str]] = {
    "one-batch": lambda: schedules(load("bench_schedules")["results"], one_batch),
    "iterations": lambda: schedules(
        load("bench_schedules")["results"], lambda one: not one_batch(one)
    ),
    "long-tasks": lambda: schedules(
        load("bench_long_tasks")["results"], lambda one: not one_batch(one)
    ),
    "readme-one-batch": lambda: schedules(
        load("bench_schedules")["results"], lambda one: one_batch(one) and in_readme(one)
    ),
    "readme-iterations": lambda: schedules(
        load("bench_schedules")["results"], lambda one: not one_batch(one) and in_readme(one)
    ),
    "delays": delays,
    "convergence-means": lambda: Convergence().means(),
    "convergence-rates": lambda: Convergence().against("learning_rate", "learning rate"),
    "convergence-steps": lambda: Convergence().against("steps", "steps"),
    "convergence-starts": lambda: Convergence().variants(
        "synchronous start", (0.0, 1.0, 2.0), "synchronous steps first"
    ),
    "convergence-ends": lambda: Convergence().variants(
        "synchronous start and end", (1.0, 2.0), "synchronous steps first and last"
    ),
    "convergence-coefficients": lambda: Convergence().coefficients("coefficient"),
    "convergence-momentum": lambda: Convergence().coefficients("prediction from the momentum"),
}


def rewritten(text: str) -> str:
    """A page with its tables made anew.

    Raises:
        KeyError: It has a table of a name that is not known.
    """
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)


def main() -> int:
    """Write or check the tables; 1 if one differs from the data."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    status = 0
    for page in PAGES:
        text = page.read_text()
        new = rewritten(text)
        if new == text:
            continue
        name = page.relative_to(REPOSITORY)
        if args.check:
            print(f"{name}: a table is not what docs/data says: run scripts/write_tables.py")
            status = 1
        else:
            page.write_text(new)
            print(f"wrote {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
