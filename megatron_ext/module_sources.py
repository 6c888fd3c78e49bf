"""Finds modules, and what their source files define, without importing any."""

from __future__ import annotations

import importlib.machinery
import symtable
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def first_on_path(folder: Path | None) -> Iterator[None]:
    """Around a search that begins in `folder`, if there is one."""
    before = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def find_spec(
    name: str, path: Sequence[str] | None = None
) -> importlib.machinery.ModuleSpec | None:
    """What Python would import under a name, of a package whose folders are `path`."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if isinstance(spec, importlib.machinery.ModuleSpec):
            return spec
    return None


def has_source(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether there is a module, and not just a folder of that name."""
    return spec is not None and spec.origin is not None


def source_of(module: str) -> Path | None:
    """The file of a module, or None; `importlib.util.find_spec` would import its parents."""
    name, path, origin = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = find_spec(name, path)
        if spec is None:
            return None
        path, origin = list(spec.submodule_search_locations or ()), spec.origin
    return Path(origin) if origin else None


def defines(source: Path | None, name: str) -> bool:
    """Whether a source file binds a name at its top level."""
    if source is None:
        return False
    try:
        table = symtable.symtable(source.read_text(), str(source), "exec")
        symbol = table.lookup(name)
    except (KeyError, OSError, SyntaxError, ValueError):
        return False
    return symbol.is_assigned() or symbol.is_imported()
