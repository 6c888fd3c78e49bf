"""`megatron-ext collapse recipe`: batch, tau and weight decay for a run that collapses."""

from __future__ import annotations

import argparse
import math
import shlex

from megatron_ext.collapse.commands import flags
from megatron_ext.collapse.controls import parse_size
from megatron_ext.collapse.recipe import make_recipe
from megatron_ext.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    parser.add_argument("--params", required=True, metavar="N", help="parameters, such as 300M")
    parser.add_argument("--tokens", required=True, metavar="D", help="tokens, such as 6B")
    parser.add_argument("--lr", type=float, metavar="RATE", help="peak learning rate")
    parser.add_argument("--batch-tokens", type=float, metavar="N", help="batch in tokens")
    parser.add_argument(
        "--seq-length",
        type=int,
        default=2048,
        metavar="N",
        help="tokens per sequence (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Work the settings out and print them.

    Raises:
        UsageError: A number cannot be.
    """
    recipe = make_recipe(
        _number(args.params, "--params"),
        _number(args.tokens, "--tokens"),
        lr=args.lr,
        batch_tokens=args.batch_tokens,
        sequence_length=args.seq_length,
    )
    words = recipe.megatron_flags()
    if args.json:
        flags.print_json({**vars(recipe), "notes": list(recipe.notes), "flags": words})
        return 0
    print(f"{recipe.tpp:.4g} tokens per parameter, tau {recipe.tau:.4g}")
    print(f"batch {recipe.batch_tokens} tokens, {recipe.train_iters} steps")
    print(shlex.join(words))
    for note in recipe.notes:
        print(f"note: {note}")
    return 0


def _number(text: str, flag: str) -> float:
    size = parse_size(text)
    if size is not None:
        return size[0]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} {text!r} is no positive number such as 300M or 6e9")
    return value
