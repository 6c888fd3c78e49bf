"""Everything that a report says of one run, as numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ext.collapse.check import CheckResult
from megatron_ext.collapse.history import History
from megatron_ext.collapse.picture import RunPicture
from megatron_ext.errors import UsageError
from megatron_ext.report.comparison import compare
from megatron_ext.report.idle import StageTime, stage_times
from megatron_ext.report.run_folder import RunFolder, find_run, follow_command
from megatron_ext.report.what_if import WhatIf, simulate_others
from megatron_ext.simulate.rank_trace import RankTrace, read_rank


@dataclass
class Run:
    """One run of a report."""

    name: str
    folder: RunFolder
    ranks: list[RankTrace] = field(default_factory=list)
    """By pipeline, then stage."""
    times: list[StageTime] = field(default_factory=list)
    check: CheckResult | None = None
    collapse: RunPicture | None = None
    reference: Any = None
    """The curve that the run was compared with."""
    what_if: WhatIf | None = None
    missing: list[str] = field(default_factory=list)
    """What the page lacks, and how to get it."""

    @property
    def losses(self) -> History | None:
        """Its loss history."""
        return self.folder.losses

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What its flags came to."""
        return self.ranks[0].settings if self.ranks else {}

    @property
    def command(self) -> list[str]:
        """The script and its flags."""
        return [str(word) for word in self.ranks[0].about.get("command", [])] if self.ranks else []

    def live_limit(self, rank: RankTrace) -> int | None:
        """Most chunk activations that a rank may hold."""
        return None if rank.live_limit is None else rank.live_limit * rank.chunks

    def label(self, rank: RankTrace) -> str:
        """Name of a rank in tables."""
        alone = len(self.ranks) == len(rank.pipeline)
        return f"stage {rank.stage}" if alone else f"stage {rank.stage} (rank {rank.rank})"

    @cached_property
    def iterations(self) -> list[int]:
        """The iterations that every rank traced."""
        if not self.ranks:
            return []
        return sorted(set.intersection(*(set(rank.batches) for rank in self.ranks)))

    @cached_property
    def batch_ms(self) -> list[float]:
        """Of every iteration, from the first rank's start to the last one's end."""
        return [
            max(rank.batches[number][1] for rank in self.ranks)
            - min(rank.batches[number][0] for rank in self.ranks)
            for number in self.iterations
        ]

    @cached_property
    def iteration_ms(self) -> float | None:
        """Mean time from the end of one iteration to that of the next, without evaluations."""
        if not self.times:
            return None
        whole = max(time.whole for time in self.times)
        return whole / len(self.iterations) if self.iterations else None

    @property
    def idle_share(self) -> float | None:
        """Mean over the ranks."""
        return statistics.fmean(t.idle_share for t in self.times) if self.times else None

    @property
    def failures(self) -> list[str]:
        """Why ranks ended early."""
        return list(dict.fromkeys(rank.failure for rank in self.ranks if rank.failure))


def read_run(
    path: Path, *, column: str | None, on_step: Callable[[str], object] = lambda _: None
) -> Run:
    """Read what a run left.

    Args:
        path: As `find_run`.
        column: Likewise.
        on_step: Called with what is done next.

    Raises:
        UsageError: There is nothing to report.
    """
    on_step(f"looking through {path}")
    folder = find_run(path, column)
    run = Run(_name(path), folder)
    if folder.traces is not None:
        on_step(f"reading the traces in {folder.traces}")
        run.ranks = _ordered(read_rank(folder.traces, folder.notes))
        run.times = stage_times(run.ranks)
        follow_command(folder, run.command, column)
    if not run.ranks and folder.losses is None:
        reason = f" ({folder.notes[0]})" if folder.notes else ""
        raise UsageError(
            f"{path} holds neither traces of --rrfp-trace nor a log with a loss{reason}"
        )
    if run.ranks and not run.iterations:
        folder.notes.append("no training iteration was traced on all ranks")
    if folder.losses is not None and folder.curves:
        on_step("comparing the loss with its reference")
        try:
            run.check, run.collapse, run.reference = compare(folder.losses, folder.curves)
        except UsageError as error:
            folder.notes.append(f"no comparison with a reference: {error}")
    if run.iterations:
        on_step("simulating other settings")
        run.what_if = simulate_others(run.ranks)
    run.missing = _missing(run)
    return run


def _name(path: Path) -> str:
    """The directory's name; that of its parent too where it says nothing by itself."""
    resolved = path.resolve()
    plain = {"trace", "traces", "run", "out", "output"}
    if resolved.name in plain and resolved.parent.name:
        return f"{resolved.parent.name}/{resolved.name}"
    return resolved.name or str(path)


def _ordered(ranks: dict[int, RankTrace]) -> list[RankTrace]:
    return sorted(ranks.values(), key=lambda rank: (rank.pipeline, rank.stage))


def _missing(run: Run) -> list[str]:
    """What the page lacks, and how to get it."""
    missing = []
    if not run.ranks:
        missing.append(
            "No traces: the run needs --pipeline-schedule rrfp --rrfp-trace DIR:FIRST-LAST, and "
            "DIR must be in the directory given here."
        )
    elif not run.command:
        missing.append("No flags: the traces were written by a simulation or an older version.")
    if run.losses is None:
        missing.append(
            "No loss: put the console log of the run (*.log), its --tensorboard-dir or its wandb "
            "directory into the directory given here."
        )
    if run.check is None:
        missing.append(
            "No collapse curve: put a curve file of megatron-ext collapse fit into the directory "
            "given here, or train with --collapse-reference FILE."
        )
    if run.ranks and not any("memory" in rank.about for rank in run.ranks):
        missing.append("No memory: only traces of a training have it, not those of a simulation.")
    return missing
