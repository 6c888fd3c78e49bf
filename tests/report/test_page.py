"""`megatron-ext report -o`: what the page says, what is missing, and that nothing gets through."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.pipeline.run_facts import HIDDEN, without_secrets
from megatron_ext.report.idle import stage_times
from megatron_ext.report.run import read_run
from megatron_ext.report.timeline import script_json
from megatron_ext.simulate.outcome import Cause
from megatron_ext.simulate.rank_trace import read_rank
from tests.report.conftest import simulate, write_log

SHAPE = "--stages 4 --microbatches 12 --iterations 3 --jitter lognormal:0.3 --hop-latency 0.3"
HOSTILE = (
    """</script><script>alert(1)</script><img src=x onerror=alert(2)>"'&]]>--><svg onload=a()>"""
)


class Elements(HTMLParser):
    """The elements of a page, and its text by the element that it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def names(self) -> list[str]:
        return [tag for tag, _ in self.found]


def report(*words: str | Path) -> int:
    return cli.main(["report", *(str(word) for word in words)])


def rewrite(folder: Path, **about: Any) -> None:
    """Change what every trace in a folder says of itself."""
    for path in folder.glob("rank-*.json"):
        head, rest = path.read_text().split("\n", 1)
        document = json.loads(head + "]}")
        document["otherData"] |= about
        path.write_text(json.dumps(document)[:-2] + "\n" + rest)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run with all its parts."""
    folder = tmp_path / "run"
    simulate(folder / "trace", f"{SHAPE} --hint bfw-depth --update 0.5")
    small = write_log(tmp_path / "small.log")
    assert cli.main(["collapse", "fit", str(small), "--out", str(folder / "reference.json")]) == 0
    write_log(folder / "train.log", fault=0.03)
    command = ["pretrain_gpt.py", "--num-layers", "8", "--lr", "1e-3"]
    rewrite(folder / "trace", command=command, memory="peak resident memory of the process")
    for path in (folder / "trace").glob("rank-*.json"):
        text = path.read_text().replace('"weight lag"', '"memory (bytes)":734003200,"weight lag"')
        path.write_text(text)
    capsys.readouterr()
    return folder


def test_what_a_page_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    assert report(run, "-o", target) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert re.fullmatch(r"wrote .*report.html: 0.\d MB; open it in a browser.*\n", output.out)
    page = Elements(target.read_text())
    for words in (
        "4 stages", "1 to 3", "bfw-depth p (this run)", "700 MiB", "activations, latency",
        "every batch computed on the newest weights (lag 0)", "--num-layers", "departure",
        "these traces do not say how long decisions took", "waits at the live limit",
    ):  # fmt: skip
        assert words in page.text, words
    # It needs nothing from elsewhere, and lets nothing in.
    links = [
        value for _, attrs in page.found for key, value in attrs.items() if key in ("src", "href")
    ]
    assert {str(link)[0] for link in links} == {"#", "d"}
    policy = next(a["content"] for _, a in page.found if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert report(run, "-o", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_bytes() == target.read_bytes()


def test_two_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    simulate(other / "trace", f"{SHAPE} --hint bfw --pipedream-2bw --live-limit 1.5p --update 0.5")
    rewrite(other / "trace", command=["pretrain_gpt.py", "--num-layers", "8", "--lr", "2e-3"])
    target = tmp_path / "report.html"
    assert report(run, other, "-o", target) == 0
    text = target.read_text()
    page = Elements(text)
    assert text.count('class="timeline"') == 2
    assert "version lag of every batch" in page.text
    (changed,) = re.findall(r'<tr class="marked"><th scope="row">--lr</th>(.*?)</tr>', text)
    assert changed == "<td>1e-3</td><td>2e-3</td>"
    assert '<tr class="marked"><th scope="row">--num-layers' not in text


def test_hostile_strings_stay_text(run: Path, tmp_path: Path) -> None:
    bad = run.with_name("run<img src=x onerror=alert(3)>")
    run.rename(bad)
    rewrite(
        bad / "trace",
        command=["pretrain_gpt.py", f"--name{HOSTILE}", HOSTILE],
        settings={"hint": HOSTILE, "live limit": 4, HOSTILE: HOSTILE},
        memory=HOSTILE,
        host=HOSTILE,
    )
    path = bad / "trace" / "rank-00001.json"
    mark = json.dumps(
        {"ph": "i", "s": "p", "name": "failed", "cat": "failed", "pid": 1, "tid": 9, "ts": 1.0,
         "args": {"error": HOSTILE}}
    )  # fmt: skip
    path.write_text(path.read_text().replace("\n]}\n", f",\n{mark}\n]}}\n"))
    log = bad / "train.log"
    log.write_text(
        f"  {HOSTILE} ..... {HOSTILE}\n  seq_length ....... {HOSTILE}\n" + log.read_text()
    )
    curve = json.loads((bad / "reference.json").read_text())
    curve["notes"], curve["source"] = [HOSTILE], HOSTILE
    (bad / f"{HOSTILE.replace('/', '')}.json").write_text(json.dumps(curve))
    (bad / "reference.json").unlink()
    target = tmp_path / "report.html"
    assert report(bad, "-o", target) == 0
    page = Elements(target.read_text())
    names = page.names()
    assert names.count("script") == 2  # the timeline's data, and the page's own
    assert not {"img", "iframe", "object"} & set(names)
    handlers = [key for _, attrs in page.found for key in attrs if key.startswith("on")]
    assert handlers == []
    assert page.text.count(HOSTILE) >= 4


def test_data_for_the_script_stays_data() -> None:
    value = {"label": HOSTILE + "\u2028"}
    text = script_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028")


@pytest.mark.parametrize(
    "flags",
    [
        "--hint bfw-depth --live-limit p --update 0.5 --task-overhead 0.05",
        "--hint bf --live-limit p --update 0.5",
        "--hint 1f1b",
        "--hint bf --live-limit 2p --replicas 2 --update 1 --reduction 1",
        "--hint bfw --live-limit 1.5p --pipedream-2bw --update 0.5 --task-overhead 0.05",
    ],
)
def test_idle_times_are_those_of_the_simulation(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, f"{SHAPE} {flags} --seeds 1")
    expected = json.loads(capsys.readouterr().out)
    times = stage_times(list(read_rank(tmp_path).values()))
    for time in times:
        assert time.whole == pytest.approx(expected["makespan"], rel=1e-5)
    for cause in Cause:
        mean = sum(time.by_cause[cause] for time in times) / len(times)
        assert mean == pytest.approx(expected["idle"][cause.name.lower()], abs=0.01)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(tmp_path / "a" / "trace", f"{SHAPE} --hint bf")
    write_log(tmp_path / "b" / "train.log")
    target = tmp_path / "report.html"
    capsys.readouterr()
    assert report(tmp_path / "a", tmp_path / "b", "-o", target) == 0
    lines = capsys.readouterr().err.splitlines()
    page = Elements(target.read_text()).text
    for line, words in (
        ("a: No flags", "written by a simulation"),
        ("a: No loss", "--tensorboard-dir"),
        ("a: No collapse curve", "megatron-ext collapse fit"),
        ("b: No traces", "--rrfp-trace DIR:FIRST-LAST"),
    ):
        (found,) = (each for each in lines if f"megatron-ext report: {line}" in each)
        assert words in found
        assert found.split(": ", 2)[2] in page


def test_a_run_that_died(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "trace" / "rank-00002.json"
    whole = path.read_text()
    path.write_text(whole[: 2 * len(whole) // 3])
    assert report(run, "-o", tmp_path / "report.html") == 0
    assert "rank-00002.json is cut off" in capsys.readouterr().err
    path.unlink()
    assert report(run, "-o", tmp_path / "report.html") == 0
    assert "there is no trace of rank 2" in capsys.readouterr().err
    page = Elements((tmp_path / "report.html").read_text())
    assert "not simulated: the traces: there is no trace of rank 2 of 4" in page.text


def test_flags_lead_to_the_rest(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace directory by itself: the loss and the reference are where the run's flags say."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    monkeypatch.chdir(tmp_path)
    writer = EventFileWriter("board")
    for step in range(1, 101):
        value = Summary.Value(tag="lm loss", simple_value=5 - step / 100)
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
    writer.close()
    (run / "reference.json").rename(tmp_path / "curve.json")
    (run / "train.log").unlink()
    flags = [
        "--tensorboard-dir=board",
        "--collapse-reference",
        "none.json",
        "curve.json",
        "--lr",
        "1",
    ]
    rewrite(run / "trace", command=["pretrain_gpt.py", *flags])
    found = read_run(run / "trace", column=None)
    assert found.losses is not None
    assert found.losses.losses[-1] == pytest.approx(4)
    assert found.check is not None
    assert found.name == "run/trace"


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, reason in (
        ([run, "-o", "x.pdf"], "-o x.pdf: the name must end in .html"),
        ([run, run, run, "-o", "x.html"], "3 directories; two at most"),
        ([run, run, "--trace", "x.json"], "2 directories; one, with --trace, at most"),
        ([tmp_path / "no", "-o", "x.html"], "no is no directory"),
        ([empty, "-o", "x.html"], "empty holds neither traces of --rrfp-trace nor a log"),
        ([run, "-o", tmp_path / "no" / "x.html"], "cannot write it (No such file or directory)"),
        ([tmp_path, "-o", "x.html"], "holds the traces of 2 runs"),
    ):
        if words[0] == tmp_path:
            simulate(tmp_path / "second", f"{SHAPE} --hint bf")
        capsys.readouterr()
        assert report(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line


def test_secrets_are_hidden() -> None:
    words = ["x.py", "--api-key", "abc", "--hf-token=abc", "--tokenizer-type", "T", "--password"]
    assert without_secrets(words) == (
        "x.py", "--api-key", HIDDEN, f"--hf-token={HIDDEN}", "--tokenizer-type", "T", "--password"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [('"args":{"batch"', '"args":{"b"'), ('"cat":"batches",', ""), ('"ts":', '"ts":"x","t":')],
)
def test_damaged_traces_are_one_line(
    old: str, new: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "trace" / "rank-00001.json"
    path.write_text(path.read_text().replace(old, new))
    assert report(run, "-o", tmp_path / "report.html") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank-00001.json is damaged" in line


@pytest.mark.parametrize(
    "settings", [None, [], {"live limit": "x", "chunks": None, "hint": []}, {"2BW clip": "x"}]
)
def test_odd_settings_are_no_reason_to_fail(settings: Any, run: Path, tmp_path: Path) -> None:
    rewrite(run / "trace", settings=settings)
    assert report(run, "-o", tmp_path / "report.html") == 0
