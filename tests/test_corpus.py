"""The corpus as Megatron reads it back, and everything that can be wrong with its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core import __version__ as megatron_version
from megatron.core.datasets.indexed_dataset import IndexedDataset
from packaging.version import Version

from megatron_ext import cli, corpus
from megatron_ext.corpus import END_OF_DOCUMENT, build_corpus, find_text_files
from megatron_ext.errors import UsageError

CONTENTS = {
    "b.txt": b"second\n",
    "a/z.py": "print('gr\u00fc\u00df dich')\n".encode(),
    "a/empty.md": b"",
    "a/b/c/deep.rst": bytes(range(1, 128)),
    "a/ignored.c": b"int main;\n",
}
# By the bytes of their paths.
IN_ORDER = ["a/b/c/deep.rst", "a/empty.md", "a/z.py", "b.txt"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "source"


def read_back(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_megatron_reads_back_the_bytes_of_every_file(source: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "new" / "corpus"
    summary = build_corpus([source], prefix)
    assert read_back(prefix) == [[*CONTENTS[name], END_OF_DOCUMENT] for name in IN_ORDER]
    dataset = IndexedDataset(str(prefix))
    assert dataset.index.dtype == np.uint16
    assert dataset.document_indices.tolist() == list(range(len(IN_ORDER) + 1))
    assert summary.documents == len(IN_ORDER)
    assert summary.tokens == sum(len(CONTENTS[name]) + 1 for name in IN_ORDER)
    assert (summary.skipped_binary, summary.skipped_unreadable) == (0, 0)
    assert files_below(prefix.parent) == ["corpus.bin", "corpus.idx"]


def test_two_builds_are_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        build_corpus([source], tmp_path / name)
    for suffix in (".bin", ".idx"):
        first, second = (tmp_path / f"{name}{suffix}" for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_a_gpt_dataset_serves_the_text(source: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split, compile_helpers
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        compile_helpers()
    text = "the quick brown fox jumps over the lazy dog. " * 40
    (source / "fox.txt").write_text(text)
    prefix = tmp_path / "corpus"
    summary = build_corpus([source], prefix)
    flags = dict(zip(summary.megatron_flags[::2], summary.megatron_flags[1::2], strict=True))
    tokenizer: Any = NullTokenizer(int(flags["--vocab-size"]))
    dataset = GPTDataset(
        IndexedDataset(str(prefix)),
        str(prefix),
        np.arange(summary.documents, dtype=np.int32),
        8,
        Split.train,
        GPTDatasetConfig(
            random_seed=1,
            sequence_length=64,
            blend=([str(prefix)], None),
            split="1,0,0",
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        ),
    )
    everything = {value for name in IN_ORDER for value in CONTENTS[name]}
    everything |= {*text.encode(), END_OF_DOCUMENT}
    for index in range(8):
        sample = dataset[index]
        assert sample["tokens"].shape == (64,)
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert set(sample["tokens"].tolist()) <= everything


def test_the_flags_make_the_end_of_document_id_the_last_one(source: Path, tmp_path: Path) -> None:
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    summary = build_corpus([source], tmp_path / "corpus")
    assert summary.megatron_flags[:4] == (
        "--data-path",
        str(tmp_path / "corpus"),
        "--tokenizer-type",
        "NullTokenizer",
    )
    assert summary.megatron_flags[4] == "--vocab-size"
    tokenizer = NullTokenizer(int(summary.megatron_flags[5]))
    assert (tokenizer.eod, tokenizer.vocab_size) == (END_OF_DOCUMENT, corpus.VOCABULARY_SIZE)
    counted_in = Version(megatron_version) >= Version("0.18")
    assert summary.megatron_flags[5] == ("257" if counted_in else "256")


def test_binary_files_are_left_out_and_counted(source: Path, tmp_path: Path) -> None:
    (source / "nul.txt").write_bytes(b"text\0text")
    (source / "latin.txt").write_bytes("gr\u00fc\u00df".encode("latin-1"))
    summary = build_corpus([source], tmp_path / "corpus")
    assert summary.skipped_binary == 2
    assert summary.documents == len(IN_ORDER)
    assert len(read_back(tmp_path / "corpus")) == len(IN_ORDER)


def test_links_cannot_loop_or_repeat_a_file(source: Path, tmp_path: Path) -> None:
    (source / "a" / "up").symlink_to(source, target_is_directory=True)
    (source / "again.txt").symlink_to(source / "b.txt")
    (source / "self.txt").symlink_to("self.txt")
    (source / "gone.txt").symlink_to("nowhere")
    os.mkfifo(source / "pipe.txt")
    summary = build_corpus([source, source / "a"], tmp_path / "corpus")
    assert summary.documents == len(IN_ORDER)
    assert summary.skipped_unreadable == 2


def test_suffixes_ignore_case_and_directories_can_be_left_out(source: Path) -> None:
    (source / "READ.TXT").write_text("loud")
    names = [path.name for path in find_text_files([source], [".txt"]).paths]
    assert names == ["READ.TXT", "b.txt"]
    kept = find_text_files([source], exclude=["b"]).paths
    assert source / "a/b/c/deep.rst" not in kept
    assert source / "a/z.py" in kept


def test_an_existing_dataset_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    build_corpus([source], prefix)
    (source / "b.txt").write_bytes(b"changed")
    before = prefix.with_suffix(".bin").read_bytes()
    with pytest.raises(UsageError, match=r"corpus\.bin exists; add --force"):
        build_corpus([source], prefix)
    assert prefix.with_suffix(".bin").read_bytes() == before
    build_corpus([source], prefix, force=True)
    assert read_back(prefix)[-1] == [*b"changed", END_OF_DOCUMENT]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_half_written_is_left(
    source: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    prefix = tmp_path / "out" / "corpus"
    build_corpus([source], prefix)
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise error

    with pytest.raises(error):
        build_corpus([source], prefix, force=True, progress=stop)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_an_index_never_lies_beside_foreign_data(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "out" / "corpus"
    build_corpus([source], prefix)
    replace = Path.replace

    def fail_on_index(self: Path, target: Path) -> Path:
        if self.suffix == ".idx":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_index)
    with pytest.raises(KeyboardInterrupt):
        build_corpus([source], prefix, force=True)
    assert files_below(prefix.parent) == []


def test_too_long_a_file_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_LONGEST_DOCUMENT", 100)
    with pytest.raises(UsageError, match=r"deep\.rst: longer than"):
        build_corpus([source], tmp_path / "corpus")


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (None, ["--from", "{}/missing", "--out", "{}/c"], "missing: no such directory"),
        ("file", ["--from", "{}/file", "--out", "{}/c"], "file: not a directory"),
        ("dir/x.c", ["--from", "{}/dir", "--out", "{}/c"], "no text files ending in .py .txt"),
        ("dir/x.py", ["--from", "{}/dir", "--out", "/"], "--out /: give a file name"),
        (
            "dir/x.py",
            ["--from", "{}/dir", "--out", "{}/c", "--suffix", "md", "--suffix", ".rst"],
            "no text files ending in .md .rst",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: str | None,
    words: list[str],
    message: str,
) -> None:
    if make is not None:
        path = tmp_path / make
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    before = files_below(tmp_path)
    assert cli.main(["corpus", *(word.format(tmp_path) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err
    assert files_below(tmp_path) == before


def test_only_binary_files_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "x.txt").write_bytes(b"\0")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="no text files"):
        build_corpus([source], tmp_path / "out" / "corpus")
    assert files_below(tmp_path / "out") == []


def test_a_place_that_cannot_be_written_is_one_line_and_exit_code_one(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source / "b.txt" / "corpus"
    assert cli.main(["corpus", "--from", str(source), "--out", str(out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--out {out}" in line


def test_the_command_prints_json_and_nothing_else(source: Path, tmp_path: Path) -> None:
    (source / "nul.txt").write_bytes(b"\0")
    words = ["--from", str(source), "--out", str(tmp_path / "corpus"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ext.cli", "corpus", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["documents"] == len(IN_ORDER)
    assert summary["skipped_binary"] == 1
    assert summary["megatron_flags"][:2] == ["--data-path", str(tmp_path / "corpus")]


def test_the_command_prints_the_flags(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "nul.txt").write_bytes(b"\0")
    assert cli.main(["corpus", "--from", str(source), "--out", str(tmp_path / "corpus")]) == 0
    out = capsys.readouterr().out
    assert f"{len(IN_ORDER)} documents" in out
    assert "Skipped: 1 binary" in out
    assert "--tokenizer-type NullTokenizer --vocab-size 25" in out
