"""Mistakes that Megatron would answer with a traceback, or only after minutes: found at the start.

Pure Python, on Megatron's parsed arguments. What our own flags get wrong is found where they are
read, in `arguments.py`.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path

from megatron_ext.errors import UsageError


def check_data(args: argparse.Namespace) -> None:
    """Refuse data that is not there.

    Megatron finds that out only after it has built the model. Only names of which there is nothing
    at all are refused; what is in the files is Megatron's business.

    Raises:
        UsageError: A path names no dataset.
    """
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for word in getattr(args, flag, None) or ():
            if _is_number(word) or "://" in word:  # a weight of a blend, an object store
                continue
            if not any(Path(f"{word}{ending}").exists() for ending in ("", ".bin", ".idx")):
                raise UsageError(
                    f"--{flag.replace('_', '-')} {word}: there is no {word}.bin and {word}.idx; "
                    "give the prefix of a dataset (megatron-ext corpus builds one from text)"
                )


def refused_flags(error: BaseException) -> str | None:
    """What to say of an assertion in Megatron's own check of its flags; None of any other error."""
    if not isinstance(error, AssertionError) or not str(error).strip():
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    if not Path(last.filename).as_posix().endswith("megatron/training/arguments.py"):
        return None
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return f"Megatron refuses these flags: {reason}; correct them (SCRIPT --help lists all)"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
