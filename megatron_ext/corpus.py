"""Build a byte-level Megatron dataset (PREFIX.bin and PREFIX.idx) from directories of text."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UsageError
from megatron_ext.progress import ProgressLine

END_OF_DOCUMENT = 256
"""Token id after the last byte of every document; ids 0 to 255 are the bytes themselves."""

VOCABULARY_SIZE = 257
"""Token ids in use: 256 bytes and the end of a document."""

DEFAULT_SUFFIXES = (".py", ".txt", ".md", ".rst")

# The index holds a document's length as a signed 32-bit number.
_LONGEST_DOCUMENT = 2**31 - 1


@dataclass(frozen=True)
class CorpusSummary:
    """What was built.

    Attributes:
        prefix: path of the dataset without `.bin` or `.idx`, what `--data-path` takes.
        documents: number of files taken, one document each.
        tokens: number of tokens in all, the end-of-document ids included.
        skipped_binary: files left out because they hold a NUL byte or are not UTF-8.
        skipped_unreadable: files and directories that could not be read.
        megatron_version: version of the Megatron that the flags are for.
        megatron_flags: flags that fit this corpus, ready to be put on Megatron's command line.
    """

    prefix: str
    documents: int
    tokens: int
    skipped_binary: int
    skipped_unreadable: int
    megatron_version: str
    megatron_flags: tuple[str, ...]


@dataclass(frozen=True)
class TextFiles:
    """The files a corpus is made of, in the order in which they are written.

    Attributes:
        paths: regular files with a wanted suffix, each real file once.
        unreadable: number of files and directories that could not be looked at.
    """

    paths: tuple[Path, ...]
    unreadable: int


def find_text_files(
    sources: Sequence[Path],
    suffixes: Sequence[str] = DEFAULT_SUFFIXES,
    exclude: Sequence[str] = (),
) -> TextFiles:
    """List the files below `sources`, the same on every machine and in every locale.

    Directories keep the order given; inside each, files are sorted by the bytes of their path.
    Links to files are followed, links to directories are not, so a loop of links ends here.

    Args:
        sources: directories to search.
        suffixes: endings of wanted file names, compared without regard to case.
        exclude: names of directories below a source to leave out.

    Raises:
        UsageError: a source is missing or is no directory.
    """
    wanted = tuple(suffix.lower() for suffix in suffixes)
    paths: list[Path] = []
    seen: set[tuple[int, int]] = set()
    unreadable: list[OSError] = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"--from {source}: no such directory")
        if not source.is_dir():
            raise UsageError(f"--from {source}: not a directory; name the directory it is in")
        found: list[Path] = []
        for folder, subfolders, names in os.walk(source, onerror=unreadable.append):
            subfolders[:] = [name for name in subfolders if name not in exclude]
            found += (Path(folder, name) for name in names if name.lower().endswith(wanted))
        for path in sorted(found, key=os.fsencode):
            try:
                status = path.stat()
            except OSError as error:
                unreadable.append(error)
                continue
            identity = (status.st_dev, status.st_ino)
            # Opening a named pipe would wait for ever for someone to write to it.
            if stat.S_ISREG(status.st_mode) and identity not in seen:
                seen.add(identity)
                paths.append(path)
    return TextFiles(tuple(paths), len(unreadable))


def is_text(content: bytes) -> bool:
    """Whether a file's content is text: UTF-8 without a NUL byte. An empty file is text."""
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def build_corpus(
    sources: Sequence[Path],
    prefix: Path,
    *,
    suffixes: Sequence[str] = DEFAULT_SUFFIXES,
    exclude: Sequence[str] = (),
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CorpusSummary:
    """Write `prefix`.bin and `prefix`.idx; either both are there and whole, or nothing is.

    Every file is one document: its bytes as uint16 ids, then END_OF_DOCUMENT.

    Args:
        sources: directories to take text files from.
        prefix: path of the dataset without a suffix; its directory is made if need be.
        suffixes: endings of wanted file names.
        exclude: names of directories to leave out.
        force: replace a dataset that is already there.
        progress: called with (files done, files in all) before the first file and after each.

    Raises:
        UsageError: a source is missing, there is no text in them, a file is too long, or the
            dataset exists and `force` is not set.
        OSError: the dataset cannot be written.
    """
    if not prefix.name:
        raise UsageError(f"--out {prefix}: give a file name without suffix, such as out/corpus")
    targets = [prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".bin", ".idx")]
    for target in targets:
        if target.exists() and not force:
            raise UsageError(
                f"--out {prefix}: {target} exists; add --force to replace it or name another prefix"
            )
    files = find_text_files(sources, suffixes, exclude)
    if not files.paths:
        raise UsageError(_nothing_found(sources, suffixes))
    if progress is not None:
        progress(0, len(files.paths))
    with _quiet_import():
        from megatron.core import __version__ as megatron_version
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = documents = binary = 0
    unreadable = files.unreadable
    # Beside the target, so that moving it there is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}-") as folder:
        parts = [Path(folder, target.name) for target in targets]
        builder: Any = IndexedDatasetBuilder(str(parts[0]), dtype=np.uint16)
        for done, path in enumerate(files.paths, start=1):
            try:
                content = path.read_bytes()
            except OSError:
                unreadable += 1
            else:
                if is_text(content):
                    ids = _token_ids(path, content)
                    builder.add_document(ids, [ids.size])
                    documents += 1
                    tokens += ids.size
                else:
                    binary += 1
            if progress is not None:
                progress(done, len(files.paths))
        builder.finalize(str(parts[1]))
        if documents == 0:
            raise UsageError(_nothing_found(sources, suffixes))
        _publish(parts, targets)
    return CorpusSummary(
        prefix=str(prefix),
        documents=documents,
        tokens=tokens,
        skipped_binary=binary,
        skipped_unreadable=unreadable,
        megatron_version=str(megatron_version),
        megatron_flags=("--data-path", str(prefix), *_tokenizer_flags()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `megatron-ext corpus` to its parser."""
    parser.add_argument(
        "--from",
        dest="sources",
        metavar="DIR",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="directories to take text files from, searched to any depth; links to directories "
        "are not followed",
    )
    parser.add_argument(
        "--out",
        metavar="PREFIX",
        type=Path,
        required=True,
        help="writes PREFIX.bin and PREFIX.idx",
    )
    parser.add_argument(
        "--suffix",
        dest="suffixes",
        metavar="SUFFIX",
        type=_suffix,
        action="append",
        help="ending of wanted file names, may be repeated "
        f"(default: {' '.join(DEFAULT_SUFFIXES)})",
    )
    parser.add_argument(
        "--exclude",
        metavar="NAME",
        action="append",
        default=[],
        help="name of a directory to leave out wherever it is met, may be repeated",
    )
    parser.add_argument("--force", action="store_true", help="replace a dataset that exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Build the corpus that the parsed flags ask for and print its summary.

    Returns:
        0 when it was built, 1 when it could not be written.

    Raises:
        UsageError: what was asked for cannot be built.
    """
    try:
        with ProgressLine("corpus", None, "files") as line:
            summary = build_corpus(
                args.sources,
                args.out,
                suffixes=args.suffixes or DEFAULT_SUFFIXES,
                exclude=args.exclude,
                force=args.force,
                progress=lambda done, total: line.update(done, total=total),
            )
    except OSError as error:
        print(f"megatron-ext corpus: error: --out {args.out}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(summary), indent=2) if args.json else _describe(summary))
    return 0


def _describe(summary: CorpusSummary) -> str:
    """Return the summary as the lines a person reads."""
    lines = [
        f"Wrote {summary.prefix}.bin and {summary.prefix}.idx: "
        f"{summary.documents:,} documents, {summary.tokens:,} tokens"
    ]
    skipped = {"binary": summary.skipped_binary, "unreadable": summary.skipped_unreadable}
    if any(skipped.values()):
        parts = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items() if count)
        lines.append(f"Skipped: {parts}")
    lines.append(f"Flags for Megatron {summary.megatron_version}:")
    lines.append(f"  {shlex.join(summary.megatron_flags)}")
    return "\n".join(lines)


def _nothing_found(sources: Sequence[Path], suffixes: Sequence[str]) -> str:
    """Return the message for sources which hold no usable file."""
    places = " ".join(str(source) for source in sources)
    return (
        f"--from {places}: no text files ending in {' '.join(suffixes)}; "
        "name another directory or give --suffix"
    )


def _publish(parts: Sequence[Path], targets: Sequence[Path]) -> None:
    """Move the finished data and index into place.

    The old index goes first: without it the data is no dataset, so at no moment does an index
    lie beside data that it does not describe.
    """
    targets[1].unlink(missing_ok=True)
    try:
        for part, target in zip(parts, targets, strict=True):
            part.replace(target)
    except BaseException:
        for target in targets:
            target.unlink(missing_ok=True)
        raise


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Hide Megatron's import-time warnings: they concern optimizers and GPUs, not datasets."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _suffix(text: str) -> str:
    """Parse one --suffix, with or without its dot."""
    if not text.strip("."):
        raise argparse.ArgumentTypeError("give the ending of a file name, such as .txt")
    return text if text.startswith(".") else f".{text}"


def _token_ids(path: Path, content: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return the ids of one document, shape (bytes + 1,).

    Raises:
        UsageError: the document is longer than an index can say.
    """
    if len(content) >= _LONGEST_DOCUMENT:
        raise UsageError(f"{path}: longer than a Megatron document (2 GiB); split the file")
    ids = np.empty(len(content) + 1, dtype=np.uint16)
    ids[:-1] = np.frombuffer(content, dtype=np.uint8)
    ids[-1] = END_OF_DOCUMENT
    return ids


def _tokenizer_flags() -> tuple[str, ...]:
    """Return the tokenizer flags that give END_OF_DOCUMENT in the installed Megatron.

    Megatron 0.17 adds the end-of-document id on top of --vocab-size, later ones count it in.
    Asking the tokenizer itself is right for both and for versions yet to come.
    """
    with _quiet_import():
        from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    size = VOCABULARY_SIZE - (int(NullTokenizer(VOCABULARY_SIZE).eod) - END_OF_DOCUMENT)
    return ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(size))
