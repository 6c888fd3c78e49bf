"""Pictures: written in every format, the same bytes again, and errors in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.errors import UsageError
from megatron_ext.plot.speedup import parse_policies
from megatron_ext.simulate.pipeline import Policy

SPEEDUP = "--stages 2 --microbatches 4 --iterations 2 --seeds 1 --sigmas 0,0.3 --policies bf:2p"
FAMILY = Path(__file__).parent.parent.parent / "docs" / "data" / "family.csv"
COLLAPSE = f"{FAMILY} --where run=fault-176 --reference-where run=width-112"
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("trace")
    flags = "--stages 3 --microbatches 4 --iterations 2 --hint bfw --update 1"
    assert cli.main(["simulate", *flags.split(), "--trace", str(target), "--json"]) == 0
    return target


@pytest.mark.parametrize("suffix", MAGIC)
def test_pictures_depend_on_their_input_alone(suffix: str, folder: Path, tmp_path: Path) -> None:
    kinds = {
        "timeline": [str(folder)],
        "speedup": SPEEDUP.split(),
        "collapse": [*COLLAPSE.split(), "--reference", str(FAMILY), "--force"],
    }
    for kind, words in kinds.items():
        pictures = []
        for name in ("a", "b"):
            target = tmp_path / f"{kind}-{name}{suffix}"
            assert cli.main(["plot", kind, *words, "-o", str(target)]) == 0
            pictures.append(target.read_bytes())
        assert pictures[0] == pictures[1]
        assert pictures[0].startswith(MAGIC[suffix])


def bars(path: Path) -> int:
    """Filled shapes of the three kinds of task."""
    return len(re.findall(r"fill: #(?:2f6fbd|2c8a57|8a5bb0)", path.read_text()))


def test_a_timeline_shows_every_task(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "timeline.svg"
    assert cli.main(["plot", "timeline", str(folder), "-o", str(target)]) == 0
    both = bars(target)
    assert both >= 2 * 3 * 3 * 4
    one = ["plot", "timeline", str(folder), "--first", "2", "--last", "2", "-o", str(target)]
    assert cli.main(one) == 0
    assert both - bars(target) == 3 * 3 * 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("timeline {folder} -o x.jpg", "-o x.jpg: the name must end in .png"),
        ("timeline /no/such -o x.png", "/no/such is no directory"),
        ("timeline {folder} --first 7 -o x.png", "holds iterations 1 to 2, not 7"),
        ("timeline {folder} -o /no/such/x.png", "-o /no/such/x.png: cannot write it"),
        ("speedup --policies bf -o x.png", "--policies 'bf' is not HINT:LIMIT"),
        ("collapse /no/such --reference {folder} -o x.png", "is a directory with neither"),
        (f"collapse /no/such --reference {FAMILY} -o x.png", "/no/such: no such file"),
        ("speedup --stages 0 -o x.png", "--stages 0"),
        ("speedup --seeds 0 -o x.png", "--seeds at least 1"),
    ],
)
def test_bad_input_is_one_clear_line(
    words: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plot", *words.format(folder=folder).split()]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1


def test_policies() -> None:
    assert parse_policies("bf:2p, my:Hint:1.5p:2bw") == [
        Policy("bf", "2p"),
        Policy("my:Hint", "1.5p", True),
    ]
    with pytest.raises(UsageError):
        parse_policies("")
