"""The dashboard: its view, what it needs, and how it reaches wandb's server (a stand-in)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli, wandb_workspace
from megatron_ext.pipeline.metrics import FIGURES
from tests.training import REPOSITORY

KEY = "marker" * 8
OURS = ("rrfp/", "pipedream-2bw/")
USER = {
    **{"__typename": "User", "id": "1", "name": "me", "username": "me", "email": ""},
    **{"admin": False, "flags": "{}", "entity": "team", "deletedAt": None},
    **{"apiKeys": None, "teams": None},
}
PROJECT = {
    **{"__typename": "Project", "id": "1", "name": "there", "entityName": "team"},
    **{"createdAt": "2026-01-01", "isBenchmark": False, "user": USER},
}


class Server(ThreadingHTTPServer):
    """Answers what the package asks of wandb's GraphQL interface; knows one project."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.saved: list[dict[str, Any]] = []


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = b""
        if self.path == "/graphql":
            asked = json.loads(raw)
            variables = asked.get("variables") or {}
            if "upsertView(" in asked["query"]:
                self.server.saved.append(variables)
            data = {
                "viewer": {**USER, "teams": {"edges": []}},
                "project": PROJECT if variables.get("name") == "there" else None,
                "upsertView": {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True},
            }
            answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        """Nothing on the console."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def command(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command where nobody is logged in, unless `variables` say otherwise."""
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environment |= {"HOME": str(home), "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext.cli", "wandb-workspace", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )


def test_a_dry_run_prints_the_whole_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wandb-workspace", "team/p", "--dry-run", "--json", "--tag", "2bw"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["entity"], view["project"], view["url"]) == ("team", "p", None)
    section = view["spec"]["section"]
    parts = section["panelBankConfig"]["sections"]
    assert [part["name"] for part in parts] == [part.name for part in wandb_workspace.PARTS]
    for part, shown in zip(wandb_workspace.PARTS, parts, strict=True):
        titles = [panel["config"]["chartTitle"] for panel in shown["panels"]]
        assert titles == [panel.title for panel in part.panels]
    (runs,) = section["runSets"]
    assert "2bw" in json.dumps(runs["filters"])
    assert runs["runFeed"]["columnPinned"]["summary:rrfp/mean bubble fraction"]


def test_what_a_person_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wandb-workspace", "p", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "Bubble fraction of each stage: rrfp/bubble fraction/stage *" in shown
    assert "Collapse (needs --collapse-reference FILE)" in shown


def test_every_metric_of_ours_in_it_exists() -> None:
    """The rest is compared with a real run, in test_wandb_run.py."""
    panels = [panel for part in wandb_workspace.PARTS for panel in part.panels]
    mine = {name for panel in panels for name in panel.metrics if name.startswith(OURS)}
    assert mine <= set(FIGURES)


def test_a_panel_of_every_stage_matches_the_stages_only() -> None:
    panel = wandb_workspace.Panel("", ("rrfp/forward (ms)", "rrfp/x"), per_stage=True)
    assert panel.regex is not None
    assert re.search(panel.regex, "rrfp/forward (ms)/stage 12")
    assert re.search(panel.regex, "rrfp/x/stage 0")
    assert not re.search(panel.regex, "rrfp/forward (ms)")
    assert not re.search(panel.regex, "rrfp/forward xmsx/stage 1")


@pytest.mark.parametrize("project", ["", "a/b/c", "a/", "/p"])
def test_what_is_no_project(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wandb-workspace", project, "--dry-run"]) == 2
    assert "is not [ENTITY/]PROJECT" in capsys.readouterr().err


def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.delitem(sys.modules, "wandb_workspaces.reports.v2", raising=False)
    assert cli.main(["wandb-workspace", "p", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "megatron-ext wandb-workspace: error: wandb-workspaces is not installed: "
        "pip install wandb-workspaces\n"
    )


def test_not_logged_in(tmp_path: Path) -> None:
    done = command(tmp_path, "team/there")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "megatron-ext wandb-workspace: error: wandb says: No API key configured: "
        "type `wandb login`, or set WANDB_API_KEY\n"
    )


def test_it_saves_the_view_and_prints_its_address(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    done = command(tmp_path, "there", "--name", "mine", WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{url}/team/there?nw=abc\n"
    (saved,) = server.saved
    assert (saved["entityName"], saved["projectName"]) == ("team", "there")
    assert saved["displayName"] == "mine"
    assert "rrfp/bubble fraction" in saved["spec"]


def test_a_project_that_wandb_does_not_know(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    done = command(tmp_path, "team/none", WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert done.returncode == 2
    assert done.stderr == (
        "megatron-ext wandb-workspace: error: wandb knows no project team/none: start a training "
        "with --wandb-project none, or correct ENTITY/PROJECT\n"
    )
    assert server.saved == []
