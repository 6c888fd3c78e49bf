"""Errors that a user can act on: one line that names the flag or the stage, and what to do."""

from __future__ import annotations


class UsageError(Exception):
    """A flag, file or environment that cannot work; the run ends with exit code 2."""


class PipelineError(Exception):
    """A pipeline that cannot go on: a lost peer, a stall, a malformed message; exit code 1."""
