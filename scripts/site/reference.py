"""A hook of MkDocs: fills the reference from the program itself when the site is built.

A page holds a line such as ``<!-- generated: flags -->``. Flags come from the parsers that
trainings and commands use, scripts from their first lines, and metrics from the names that are
logged. What a metric means stands once, in a table ``| metric | what it says |`` of a page in
docs/; a metric without a row there ends the build.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from megatron_ext import __main__ as runner
from megatron_ext import arguments, cli
from megatron_ext.pipeline import metrics

ROOT = Path(__file__).resolve().parent.parent.parent
COLLAPSE_METRICS = ROOT / "megatron_ext" / "collapse" / "callback.py"
_MARK = re.compile(r"^<!-- generated: (?P<name>\S+) -->$", re.MULTILINE)
_TABLE = re.compile(r"^\| metric \| what it says \|\n\| --- \| --- \|\n(?P<rows>(?:\|.*\n)+)", re.M)
_ROW = re.compile(r"^\| (?P<names>`.*?) \| (?P<meaning>.*) \|$", re.M)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what is asked for in the place of every mark."""

    def filled(mark: re.Match[str]) -> str:
        if mark["name"] not in GENERATORS:
            raise PluginError(
                f"{page.file.src_uri}: nothing generates {mark['name']!r}; there are "
                f"{', '.join(GENERATORS)}"
            )
        return GENERATORS[mark["name"]]()

    return _MARK.sub(filled, markdown)


# Flags of a training.


def runner_flags() -> str:
    """What stands before the script."""
    return _flags(runner.build_parser())


def training_flags() -> str:
    """Our flags among Megatron's, by capability."""
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    sections = []
    for group in _groups(parser):
        title = group.title or ""
        if title.startswith("megatron_ext: "):
            heading = _capital(title.removeprefix("megatron_ext: "))
            sections.append(f"## {heading}\n\n{_table(group, anchors=True)}")
    return "\n\n".join(sections)


def refused() -> str:
    """Megatron's flags that ours refuse to run with."""
    tables = {
        "--pipeline-schedule rrfp": arguments._UNSUPPORTED,
        "--pipedream-2bw": arguments._WITHOUT_SECOND_VERSION,
        "--rrfp-jitter": arguments._WITHOUT_STEPS,
    }
    rows = ["| flag of ours | refuses |", "| --- | --- |"]
    for ours, theirs in tables.items():
        rows.append(f"| `{ours}` | {', '.join(f'`{flag}`' for _, flag, _ in theirs)} |")
    return "\n".join(rows)


# Commands and scripts.


def commands() -> str:
    """Every `megatron-ext` command with its flags."""
    sections = []
    for command in cli.COMMANDS:
        top = cli.build_parser([command.name])
        parser = _subparsers(top)[command.name]
        sections += list(_command(f"megatron-ext {command.name}", parser, level=2))
    return "\n\n".join(sections)


def _command(name: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    _complete(parser)
    below = _subparsers(parser)
    yield f"{'#' * level} `{name}`\n\n{_markdown(parser.description or '')}"
    if not below:
        yield _flags(parser)
    for word, subparser in below.items():
        yield from _command(f"{name} {word}", subparser, level + 1)


def _complete(parser: argparse.ArgumentParser) -> None:
    """Let a parser that gets its flags when it is first used have them."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        parser.parse_known_args(["--help"])


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def scripts() -> str:
    """What each script says of itself in its first sentence."""
    rows = ["| script | what it does |", "| --- | --- |"]
    for path in sorted((ROOT / "scripts").iterdir()):
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
        elif path.suffix == ".sh":
            lines = path.read_text().removeprefix("#!/usr/bin/env bash\n").splitlines()
            comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
            text = "\n".join(line.removeprefix("#").strip() for line in comment)
        else:
            continue
        summary = " ".join(text.split("\n\n")[0].split())
        summary = re.split(r"(?<=[.:]) ", summary)[0].removesuffix(":").removesuffix(".")
        rows.append(f"| `scripts/{path.name}` | {summary}. |")
    return "\n".join(rows)


# Metrics.


def metric_names() -> tuple[str, ...]:
    """Every metric that a training logs; those of the pipeline also come per stage."""
    tree = ast.parse(COLLAPSE_METRICS.read_text())
    collapse = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("collapse/")
    }
    pipeline = (name if "/" in name else f"rrfp/{name}" for name in metrics.FIGURES)
    return (*pipeline, *sorted(collapse))


def metric_table() -> str:
    """Every metric with its unit and its meaning."""
    meanings = _meanings()
    names = metric_names()
    if missing := [name for name in names if name not in meanings]:
        raise PluginError(f"no table of metrics in docs/ says what {missing[0]!r} means")
    if stale := [name for name in meanings if name not in names]:
        raise PluginError(f"a table of metrics in docs/ has {stale[0]!r}, which is not logged")
    rows = ["| metric | unit | what it says |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {_unit(name)} | {meanings[name]} |" for name in names]
    return "\n".join(rows)


def _meanings() -> dict[str, str]:
    """What the tables of metrics in docs/ say, by name."""
    found = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        for table in _TABLE.finditer(page.read_text()):
            for row in _ROW.finditer(table["rows"]):
                for name in re.findall(r"`([^`]+)`", row["names"]):
                    found[name] = row["meaning"]
    return found


UNITS = {
    "ms": "milliseconds",
    "us": "microseconds",
    "rrfp/bubble fraction": "0 to 1",
    "rrfp/live peak": "chunk activations",
    "collapse/alarm": "0 or 1",
    "collapse/normalized loss": "of the final loss",
    "collapse/predicted final loss": "nats per token",
    "collapse/reference": "of the final loss",
    "collapse/residual": "of the final loss",
}
"""Of what stands in brackets at the end of a metric's name, and of metrics without brackets."""


def _unit(name: str) -> str:
    bracket = re.search(r"\((\w+)\)$", name)
    return UNITS.get(bracket[1], bracket[1]) if bracket else UNITS.get(name, "")


# How a parser's flags are written.


def _groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    return [group for group in parser._action_groups if _shown(group)]


def _shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [
        action
        for action in group._group_actions
        if not isinstance(action, hidden) and action.help is not argparse.SUPPRESS
    ]


def _flags(parser: argparse.ArgumentParser) -> str:
    """A table of argparse's own groups, which need no title, and one of each other group."""
    own, titled = [], []
    for group in _groups(parser):
        if group.title in ("positional arguments", "options"):
            own += _rows(group)
        else:
            titled.append(f"**{_capital(group.title or '')}**\n\n{_table(group)}")
    return "\n\n".join([*(["\n".join([*_HEAD, *own])] if own else []), *titled])


def _table(group: argparse._ArgumentGroup, anchors: bool = False) -> str:
    return "\n".join([*_HEAD, *_rows(group, anchors)])


_HEAD = ("| flag | default | what it does |", "| --- | --- | --- |")


def _rows(group: argparse._ArgumentGroup, anchors: bool = False) -> list[str]:
    rows = []
    for action in _shown(group):
        names = action.option_strings[-1:] if anchors else []
        anchor = "".join(f'<a id="{name.lstrip("-")}"></a>' for name in names)
        told, default = _split_default(action)
        rows.append(f"| {anchor}`{_signature(action)}` | {default} | {told} |")
    return rows


def _signature(action: argparse.Action) -> str:
    """A flag and what follows it, as a usage line writes it."""
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    if action.choices is not None and action.metavar is None:
        value = f"{{{','.join(map(str, action.choices))}}}"
    else:
        value = str(action.metavar or (action.dest.upper() if name else action.dest))
    if action.nargs in ("+", "*", argparse.REMAINDER):
        value += " ..."
    elif action.nargs == "?":
        value = f"[{value}]"
    return f"{name} {value}".strip()


def _split_default(action: argparse.Action) -> tuple[str, str]:
    """The help text, and its default: what the text says of it in brackets at its end, if any."""
    text = (action.help or "").replace("%(default)s", f"{action.default}").replace("%%", "%")
    text = " ".join(text.split())
    if said := re.search(r" ?\(default:? (?P<default>.*)\)$", text):
        return _markdown(text[: said.start()]), _markdown(said["default"])
    return _markdown(text), _default(action)


def _default(action: argparse.Action) -> str:
    """What argparse takes where the flag is not given."""
    if action.required:
        return "needed"
    if action.nargs == 0:
        return "off"
    if action.default in (None, [], "", math.inf):
        return "none"
    value = action.default
    if isinstance(value, list | tuple):
        return ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else _markdown(str(value))


def _markdown(text: str) -> str:
    """A help text as Markdown, with flags as code."""
    return re.sub(r"(?<![\w`-])(--[a-z0-9][a-z0-9-]*)", r"`\1`", _escaped(text))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


GENERATORS: dict[str, Callable[[], str]] = {
    "runner-flags": runner_flags,
    "training-flags": training_flags,
    "refused": refused,
    "commands": commands,
    "scripts": scripts,
    "metrics": metric_table,
}
"""What a mark may ask for."""
