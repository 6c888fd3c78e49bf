"""One replacement in Megatron: what it is, how it is put in place and taken out again.

A hook names one function of Megatron. Installing it puts the replacement where the function is
defined and in every module that has imported it by name; uninstalling puts the original back in
all of these. Modules imported later find whatever is in place then.

A Megatron that carries the patches in ``patches/`` calls us by itself in some of these places. A
hook that names such a place joins in there and replaces nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import UsageError
from megatron_ext.megatron_version import SUPPORTED_MEGATRON, megatron_version

Function = Callable[..., Any]


@dataclass(frozen=True)
class NativePlace:
    """Where a patched Megatron calls us by itself."""

    module: str
    """There if this Megatron is patched."""
    join: Callable[[Any], Callable[[], None]]
    """Joins in, given that module; returns what undoes it."""


@dataclass(frozen=True)
class Hook:
    """One replacement in Megatron."""

    module: str
    name: str
    wrap: Callable[[Function], Function]
    """Makes the replacement from the original."""
    why: str
    versions: str = SUPPORTED_MEGATRON
    """Versions of Megatron whose function is known to be the one that `wrap` expects."""
    native: NativePlace | None = None
    """What a patched Megatron has instead."""

    @property
    def target(self) -> str:
        """Dotted name of the function."""
        return f"{self.module}.{self.name}"


_installed: dict[Hook, Callable[[], None]] = {}
"""Every hook in place, and what takes it out."""


def install(hooks: Iterable[Hook]) -> None:
    """Put `hooks` in place; those already in place stay as they are.

    Raises:
        UsageError: This Megatron has no such function.
    """
    for hook in hooks:
        if hook in _installed:
            continue
        if hook.native is not None and (place := _patched_in(hook.native.module)) is not None:
            _installed[hook] = hook.native.join(place)
            continue
        original = getattr(importlib.import_module(hook.module), hook.name, None)
        if original is None:
            raise UsageError(
                f"Megatron {megatron_version()} has no {hook.target}, which is needed to "
                f"{hook.why}; supported are {SUPPORTED_MEGATRON}"
            )
        # Megatron keeps state in attributes of some of its functions.
        replacement = functools.update_wrapper(hook.wrap(original), original)
        _rebind(original, replacement)
        _installed[hook] = functools.partial(_rebind, replacement, original)


def uninstall(hooks: Iterable[Hook] | None = None) -> None:
    """Take `hooks`, or all, out again."""
    for hook in installed() if hooks is None else list(hooks):
        if hook in _installed:
            _installed.pop(hook)()


def installed() -> list[Hook]:
    """The hooks in place."""
    return list(_installed)


def _patched_in(module: str) -> Any:
    """A module that only a patched Megatron has; None in others."""
    return importlib.import_module(module) if importlib.util.find_spec(module) else None


def _rebind(old: Function, new: Function) -> None:
    """Replace `old` by `new` in the name space of every imported module."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or module.__name__.startswith("megatron_ext."):
            continue
        for name, value in list(names.items()):
            if value is old:
                names[name] = new
