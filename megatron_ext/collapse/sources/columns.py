"""What a column of a log is, told by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_ext.collapse.history import Split
from megatron_ext.errors import UsageError

# Best first; compared in lower case with every separator read as a blank.
_STEPS = ("step", "iteration", "iter", "steps", "global step", "trainer global step", "train step")
_TOKENS = (
    "tokens",
    "tokens seen",
    "consumed tokens",
    "train tokens",
    "total tokens",
    "throughput total tokens",
    "num tokens",
)
_LOSSES = (
    "lm loss",
    "loss",
    "train loss",
    "training loss",
    "train ce loss",
    "train lm loss",
    "lm loss validation",
    "val loss",
    "validation loss",
    "valid loss",
    "eval loss",
)
_EXTRAS = {
    "lr": ("lr", "learning rate", "train lr", "optim lr", "optim learning rate group 0"),
    "grad_norm": ("grad norm", "train grad norm", "optim total grad norm", "gradient norm"),
    "batch_size": ("batch size", "global batch size"),
    "samples": ("consumed samples", "samples", "samples vs steps"),
    "skipped": ("number of skipped iterations", "skipped", "optim step skipped"),
}
_END = ("iterations", "total iterations", "total steps", "train iters", "max steps", "num steps")
_VALIDATION = re.compile(r"\b(val|valid|validation|eval|evaluation|test|dev|c4|pile)\b")


def normalised(name: str) -> str:
    """`name` in lower case with blanks for separators; of a wandb export without the run's name."""
    name = name.rsplit(" - ", 1)[-1]
    return re.sub(r"[\s/_.()\[\]:-]+", " ", name).strip().lower()


def find_steps(names: Sequence[str]) -> str | None:
    """The column of steps, or None."""
    return _first(names, _STEPS)


def find_tokens(names: Sequence[str]) -> str | None:
    """The column of tokens seen, or None."""
    return _first(names, _TOKENS)


def find_end(names: Sequence[str]) -> str | None:
    """The column that repeats the number of steps planned, or None."""
    return _first(names, _END)


def find_extras(names: Sequence[str]) -> dict[str, str]:
    """The columns that go along: their role to their name."""
    found = {role: _first(names, known) for role, known in _EXTRAS.items()}
    return {role: name for role, name in found.items() if name is not None}


def find_loss(source: str, names: Sequence[str], wanted: str | None) -> str:
    """The column of losses.

    Args:
        source: for messages.
        names: all columns.
        wanted: what the user asked for, exactly or by its normalised form; None to guess.

    Raises:
        UsageError: There is none, or several could be meant.
    """
    if wanted is not None:
        if wanted in names:
            return wanted
        same = [name for name in names if normalised(name) == normalised(wanted)]
        if len(same) == 1:
            return same[0]
        raise UsageError(f"{source}: no column {wanted!r}; there are {listed(names)}")
    usable = [name for name in names if not name.endswith(("__MIN", "__MAX"))]
    for known in _LOSSES:
        same = [name for name in usable if normalised(name) == known]
        if len(same) == 1:
            return same[0]
        if len(same) > 1:
            raise UsageError(f"{source}: several losses, {listed(same)}: choose with --column")
    like = [name for name in usable if re.search(r"\bloss\b", normalised(name))]
    # Megatron logs every scalar twice, over steps and over samples.
    like = [name for name in like if not normalised(name).endswith("vs samples")]
    like = [name for name in like if normalised(name) != "loss scale"]
    if len(like) == 1:
        return like[0]
    if like:
        raise UsageError(f"{source}: several losses, {listed(like)}: choose with --column")
    raise UsageError(
        f"{source}: no column looks like a loss among {listed(names)}: choose with --column"
    )


def split_of(loss: str) -> Split:
    """Whether a column of this name holds training or validation losses."""
    return "validation" if _VALIDATION.search(normalised(loss)) else "train"


def listed(names: Sequence[str]) -> str:
    """Names for a message, shortened to what fits in a line."""
    shown = [name if len(name) <= 60 else name[:57] + "..." for name in names[:12]]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 12} more" if names[12:] else "")


def _first(names: Sequence[str], known: Sequence[str]) -> str | None:
    by_form: dict[str, str] = {}
    for name in names:
        by_form.setdefault(normalised(name), name)
    return next((by_form[form] for form in known if form in by_form), None)
