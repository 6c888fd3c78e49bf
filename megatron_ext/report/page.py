"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_ext import __version__
from megatron_ext.report import pipeline_sections, training_sections
from megatron_ext.report.blocks import Note, Paragraph, Section, duration, number, percent
from megatron_ext.report.run import Run


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of two side by side."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = _file("timeline.js").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(_file("page.html")).render(
        title=title(runs),
        facts=_facts(runs),
        sections=[section for section in _sections(runs) if section.blocks],
        style=Markup(_file("page.css").strip()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        version=__version__,
    )


def title(runs: Sequence[Run]) -> str:
    """What the page is about."""
    return "Run report: " + " and ".join(run.name for run in runs)


def _file(name: str) -> str:
    return resources.files("megatron_ext.report").joinpath(name).read_text(encoding="utf-8")


def _sections(runs: Sequence[Run]) -> list[Section]:
    traced = [run for run in runs if run.iterations]
    sections = [_remarks(runs)]
    if traced:
        sections += [
            pipeline_sections.timeline_section(traced),
            pipeline_sections.idle_section(traced),
            training_sections.what_if_section(traced),
            pipeline_sections.tasks_section(traced),
            pipeline_sections.messages_section(traced),
            pipeline_sections.decisions_section(traced),
            pipeline_sections.weights_section(traced),
            pipeline_sections.memory_section(traced),
            pipeline_sections.iterations_section(traced),
        ]
    sections += [
        training_sections.loss_section(runs),
        training_sections.collapse_section(runs),
        training_sections.settings_section(runs),
    ]
    return sections


def _remarks(runs: Sequence[Run]) -> Section:
    """What went wrong, and what is not on the page."""
    section = Section("remarks", "Remarks")
    for run in runs:
        failures = [Note(f"{run.name}: the run failed: {text}", "alarm") for text in run.failures]
        section.blocks += failures
        if run.check is not None and run.check.comparable and run.check.alarms:
            count = len(run.check.alarms)
            section.blocks.append(
                Note(f"{run.name}: the loss rang {count} alarm{'s' * (count > 1)}.", "alarm")
            )
        section.blocks += [Note(f"{run.name}: {note}") for note in run.folder.notes]
    texts = list(dict.fromkeys(text for run in runs for text in run.missing))
    for text in texts:
        names = " and ".join(run.name for run in runs if text in run.missing)
        section.blocks.append(Note(f"{names}: {text}"))
    if section.blocks:
        section.blocks.append(Paragraph("All else that was looked for was found."))
    return section


def _facts(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The figures at the top, by name and run; those that no run has are left out."""

    def of(run: Run) -> dict[str, str | None]:
        losses, found = run.losses, run.what_if
        shape = None
        if run.iterations:
            stages = len(run.ranks[0].pipeline)
            replicas = len(run.ranks) // stages if stages else 1
            shape = f"{stages} stages" + (f" × {replicas}" if replicas > 1 else "")  # noqa: RUF001
        best = None
        if found is not None and found.found:
            mine = next(one for one in found.found if str(one.policy) == found.ran)
            gain = mine.summary.makespan / found.found[0].summary.makespan
            best = f"{gain:.2f}x, {found.found[0].policy}"
        alarms = None if run.check is None else str(len(run.check.alarms))
        return {
            "pipeline": shape,
            "iterations traced": _span(run.iterations),
            "per iteration": duration(run.iteration_ms) if run.iterations else None,
            "idle, mean over stages": percent(run.idle_share) if run.iterations else None,
            "policy": found.ran if found is not None and found.ran else _policy(run),
            "best simulated": best,
            "last loss": None if losses is None else number(float(losses.losses[-1]), 4),
            "alarms": alarms,
        }

    values = [(run.name, of(run)) for run in runs]
    facts = []
    for name in values[0][1]:
        if any(each[name] is not None for _, each in values):
            facts.append((name, [(run, each[name] or number(None)) for run, each in values]))
    return facts


def _policy(run: Run) -> str | None:
    hint = run.settings.get("hint")
    if hint is None:
        return None
    two = " 2BW" if any(name.startswith("2BW") for name in run.settings) else ""
    return f"{hint} {run.settings.get('live limit', '')}{two}"


def _span(numbers: Sequence[int]) -> str | None:
    if not numbers:
        return None
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{numbers[0]} to {numbers[-1]}"
