"""`megatron-ext wandb-workspace`: a dashboard in wandb for what a training of ours logs.

The sections are plain data here, so that tests can compare them with what a run really logs; the
package `wandb-workspaces` makes the view of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import UsageError

DEFAULT_NAME = "Readiness-driven pipeline"
PER_STAGE = "/stage "


@dataclass(frozen=True)
class Panel:
    """One plot over the iterations.

    Attributes:
        title: Above it.
        metrics: What it shows.
        per_stage: Show the figure of every pipeline stage instead of that over all.
    """

    title: str
    metrics: tuple[str, ...]
    per_stage: bool = False

    @property
    def regex(self) -> str | None:
        """Matches the metrics of every stage; None where they are named."""
        if not self.per_stage:
            return None
        # Not re.escape: other engines than Python's may refuse to have blanks escaped.
        names = "|".join(re.sub(r"[().]", r"\\\g<0>", name) for name in self.metrics)
        return f"^({names}){PER_STAGE}[0-9]+$"


@dataclass(frozen=True)
class Part:
    """A section of the dashboard.

    Attributes:
        name: Its heading.
        panels: Its plots.
        needs: Flags without which it stays empty.
    """

    name: str
    panels: tuple[Panel, ...]
    needs: str


PARTS = (
    Part(
        "Pipeline health",
        (
            Panel("Bubble fraction", ("rrfp/bubble fraction",)),
            Panel("Bubble fraction of each stage", ("rrfp/bubble fraction",), per_stage=True),
            Panel("Batch (ms)", ("rrfp/batch (ms)",)),
            Panel("Activations held, most on each stage", ("rrfp/live peak",), per_stage=True),
            Panel(
                "Tasks (ms)",
                ("rrfp/forward (ms)", "rrfp/backward (ms)", "rrfp/weight (ms)"),
            ),
            Panel("Forward of each stage (ms)", ("rrfp/forward (ms)",), per_stage=True),
            Panel("Nothing ready, each stage (ms)", ("rrfp/message wait (ms)",), per_stage=True),
            Panel("Messages waiting, each stage (ms)", ("rrfp/message age (ms)",), per_stage=True),
            Panel("Choosing a task (us)", ("rrfp/dispatch (us)", "rrfp/agreement (us)")),
        ),
        "--pipeline-schedule rrfp",
    ),
    Part(
        "Two weight versions (2BW)",
        (
            Panel("Version lag (updates)", ("pipedream-2bw/version lag (updates)",)),
            Panel(
                "Update: from the last task to new weights (ms)",
                ("pipedream-2bw/update latency (ms)", "pipedream-2bw/update wait (ms)"),
            ),
            Panel("Update wait of each stage (ms)", ("pipedream-2bw/update wait (ms)",), True),
            Panel("Update, computing (ms)", ("rrfp/update (ms)",)),
            Panel("Gradient norm that clips, each stage", ("pipedream-2bw/grad norm",), True),
        ),
        "--pipedream-2bw",
    ),
    Part(
        "Collapse",
        (
            Panel("Alarm", ("collapse/alarm",)),
            Panel("Normalised loss", ("collapse/normalized loss", "collapse/reference")),
            Panel("Residual", ("collapse/residual",)),
            Panel("Predicted final loss", ("collapse/predicted final loss", "lm loss")),
        ),
        "--collapse-reference FILE",
    ),
    Part(
        "Throughput",
        (
            Panel("TFLOP/s per GPU", ("throughput",)),
            Panel("Iteration (s)", ("iteration-time",)),
            Panel("Samples", ("samples vs steps",)),
            Panel("Batch size", ("batch-size",)),
            Panel("Loss", ("lm loss",)),
            Panel("Gradient norm", ("grad-norm",)),
            Panel("Learning rate", ("learning-rate",)),
        ),
        "--tensorboard-dir DIR --log-throughput --log-timers-to-tensorboard",
    ),
)
COLUMNS = (
    "rrfp/mean bubble fraction",
    "rrfp/peak live",
    "pipedream-2bw/mean update wait (ms)",
    "collapse/alarms",
    "collapse/predicted final loss",
    "throughput",
    "lm loss",
)
"""Entries of the runs' summaries that the table of runs shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `megatron-ext wandb-workspace` to its parser."""
    parser.add_argument(
        "project",
        metavar="[ENTITY/]PROJECT",
        help="the project that Megatron's --wandb-project names; without ENTITY your default one",
    )
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help="of the new view (default: %(default)s)"
    )
    parser.add_argument(
        "--tag", help="show only runs with this tag, such as rrfp, 2bw, collapse or a hint's name"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be made, without the network"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, with the whole view")


def run(args: argparse.Namespace) -> int:
    """Make the view, or say what it would be.

    Raises:
        UsageError: A package is missing, wandb is not logged in, or does not know the project.
    """
    entity, _, project = args.project.rpartition("/")
    if not project or "/" in entity or (not entity and "/" in args.project):
        raise UsageError(f"{args.project} is not [ENTITY/]PROJECT")
    if args.dry_run:
        workspace = make_workspace(entity or "ENTITY", project, args.name, args.tag)
        url = None
    else:
        workspace, url = _create(entity, project, args.name, args.tag)
    if args.json:
        print(json.dumps(describe(workspace) | {"url": url}, indent=2))
        return 0
    if url is not None:
        print(url)
        return 0
    for part in PARTS:
        print(f"{part.name} (needs {part.needs})")
        for panel in part.panels:
            suffix = f"{PER_STAGE}*" if panel.per_stage else ""
            print(f"  {panel.title}: {', '.join(name + suffix for name in panel.metrics)}")
    return 0


def make_workspace(entity: str, project: str, name: str, tag: str | None = None) -> Any:
    """The dashboard as an object of `wandb-workspaces`, not saved; needs no network.

    Raises:
        UsageError: The package is missing, or refuses the name.
    """
    reports, workspaces = _packages()
    sections = [
        workspaces.Section(
            name=part.name,
            is_open=True,
            panels=[
                reports.LinePlot(
                    title=panel.title,
                    y=[] if panel.regex else list(panel.metrics),
                    metric_regex=panel.regex,
                )
                for panel in part.panels
            ],
        )
        for part in PARTS
    ]
    runs = workspaces.RunsetSettings(
        filters=workspaces.And(workspaces.Tags().isin([tag])) if tag else "",
        pinned_columns=[f"summary:{name}" for name in COLUMNS],
    )
    try:
        return workspaces.Workspace(
            entity=entity, project=project, name=name, sections=sections, runset_settings=runs
        )
    except ValueError as error:
        line = str(error).strip().splitlines()[-1]
        raise UsageError(f"--name {name!r}: wandb-workspaces refuses it: {line}") from None


def describe(workspace: Any) -> dict[str, Any]:
    """The view for JSON, its spec as wandb stores it."""
    view = workspace._to_model()
    spec = view.spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    return {
        "entity": workspace.entity,
        "project": workspace.project,
        "name": workspace.name,
        "spec": spec,
    }


def _packages() -> tuple[Any, Any]:
    try:
        with _quiet():
            import wandb_workspaces.reports.v2 as reports
            import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        missing = error.name or "wandb-workspaces"
        raise UsageError(
            f"{missing.partition('.')[0].replace('_', '-')} is not installed: "
            "pip install wandb-workspaces"
        ) from None
    return reports, workspaces


def _create(entity: str, project: str, name: str, tag: str | None) -> tuple[Any, str]:
    """Make the view on the server; the workspace and where to look at it."""
    make_workspace(entity or "ENTITY", project, name, tag)  # first what needs no server
    import wandb

    # Without a terminal wandb asks nobody for a key.
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        with _quiet():
            api = wandb.Api(timeout=30)
            entity = entity or str(api.default_entity or "")
            known = entity and _knows(api, entity, project)
    except Exception as error:
        raise _explained(error) from None
    if not known:
        where = f"{entity}/{project}" if entity else project
        raise UsageError(
            f"wandb knows no project {where}: start a training with --wandb-project {project}, or "
            "correct ENTITY/PROJECT"
        )
    workspace = make_workspace(entity, project, name, tag)
    try:
        with _quiet():
            workspace.save()
            return workspace, str(workspace.url)
    except Exception as error:
        raise _explained(error) from None


def _knows(api: Any, entity: str, project: str) -> bool:
    try:
        return bool(api.project(project, entity).id)
    except ValueError:  # wandb's way to say that there is none
        return False


def _explained(error: Exception) -> UsageError:
    reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
    advice = ""
    if re.search(r"api.?key|log ?in|auth|401|403", reason, re.IGNORECASE):
        reason = reason.partition(". Use `wandb login`")[0]
        advice = ": type `wandb login`, or set WANDB_API_KEY"
    return UsageError(f"wandb says: {reason}{advice}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What packages print on the way is not for whoever reads our output."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
