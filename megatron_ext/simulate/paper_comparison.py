"""The tables of docs/paper-comparison.md: the paper's speedups beside simulated ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from megatron_ext.pipeline.hints import BackwardForward
from megatron_ext.progress import ProgressLine
from megatron_ext.simulate import paper_settings as paper
from megatron_ext.simulate.jitter_law import JitterLaw
from megatron_ext.simulate.paper_model import (
    Modelled,
    compute_share,
    hop_of_table_3,
    slowdown,
)
from megatron_ext.simulate.paper_settings import Setting
from megatron_ext.simulate.pipeline import BASELINE, Policy


class EvenBackwardForward(BackwardForward):
    """The paper's BF, whose limit is the same on every stage."""

    tapers = False


BF, BFW = Policy(f"{__name__}:EvenBackwardForward", "32"), Policy("bfw", "32")
_FIXED = Policy("1f1b", "32")
_PIECES = Policy("bfw-pieces", "p")

Lines = Iterator[str]


def print_comparison(name: str, seeds: range) -> None:
    """Print one table, or all, as Markdown; means over `seeds`."""
    chosen = TABLES if name == "paper" else {name: TABLES[name]}
    with ProgressLine("simulate", len(chosen), "tables") as progress:
        for done, table in enumerate(chosen.values()):
            print("\n".join(table(seeds)), end="\n\n", flush=True)
            progress.update(done + 1)


def _mean(seeds: range, value: Callable[[int], float]) -> float:
    return statistics.fmean(value(seed) for seed in seeds)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _head(*names: str, words: int = 2) -> Lines:
    """A table's head; all but the first `words` columns hold numbers."""
    yield _row(names)
    yield _row("---" if column < words else "---:" for column in range(len(names)))


def _speedups(settings: tuple[Setting, ...]) -> Callable[[range], Lines]:
    def lines(seeds: range) -> Lines:
        yield from _head(
            "model", "layout", "F (ms)",
            "paper BF", "BF, free messages", "BF", "1F1B's order at 32",
            "paper BFW", "BFW", "`bfw-pieces` at `p`",
        )  # fmt: skip
        for setting in settings:

            def speedup(policy: Policy, hop: bool = True, setting: Setting = setting) -> str:
                def one(seed: int) -> float:
                    return _modelled(setting, seed, hop).speedup(policy)

                return f"{_mean(seeds, one):.2f}"

            unit = _mean(seeds, lambda seed: _modelled(setting, seed).forward_ms)  # noqa: B023
            yield _row(
                [
                    setting.model,
                    setting.layout,
                    f"{unit:.1f}",
                    f"{setting.seconds_1f1b / setting.seconds_bf:.2f}",
                    speedup(BF, False),
                    speedup(BF),
                    speedup(_FIXED),
                    f"{setting.seconds_1f1b / setting.seconds_bfw:.2f}",
                    speedup(BFW),
                    speedup(_PIECES),
                ]
            )

    return lines


def _modelled(setting: Setting, seed: int, hop: bool = True) -> Modelled:
    return Modelled(setting, hop_of_table_3(seed) if hop else 0.0, seed)


def _table_3(seeds: range) -> Lines:
    yield from _head("schedule", "paper", "simulated", words=1)
    for name, policy, blocking in (("1F1B", BASELINE, True), ("BF", BF, False)):

        def share(seed: int, policy: Policy = policy, blocking: bool = blocking) -> float:
            return compute_share(policy, hop_of_table_3(seed), seed, blocking=blocking)

        yield _row([name, f"{paper.TABLE_3_COMPUTE[name]:.1%}", f"{_mean(seeds, share):.1%}"])
    hop = _mean(seeds, hop_of_table_3)
    yield ""
    yield f"A message takes {hop:.2f} forwards of the last stage."


def _table_6(seeds: range) -> Lines:
    yield from _head(
        "level", "paper 1F1B", "simulated", "paper BF", "simulated", "`bfw-pieces` at `p`", words=1
    )
    setting = paper.TABLE_6_SETTING
    for level, (fixed, ready) in paper.TABLE_6.items():
        law = replace(JitterLaw.parse(level), sigma=0.15)

        def measured(policy: Policy, blocking: bool, law: JitterLaw = law) -> str:
            def one(seed: int) -> float:
                hop = hop_of_table_3(seed)
                return slowdown(setting, policy, law, hop, seed, blocking=blocking)

            return f"{_mean(seeds, one):.1%}"

        yield _row(
            [
                level,
                f"{fixed:.1%}",
                measured(BASELINE, True),
                f"{ready:.1%}",
                measured(BF, False),
                measured(_PIECES, False),
            ]
        )


def _table_7(seeds: range) -> Lines:
    yield from _head("hint at 32", "paper", "free messages", "messages take time", words=1)
    setting = paper.TABLE_7_SETTING
    for hint, longer in paper.TABLE_7.items():

        def measured(hop: bool, hint: str = hint) -> str:
            def one(seed: int) -> float:
                modelled = _modelled(setting, seed, hop)
                return modelled.speedup(BF) / modelled.speedup(Policy(hint, "32")) - 1

            return f"{_mean(seeds, one):+.1%}"

        yield _row([f"`{hint}`", f"{longer:+.1%}", measured(False), measured(True)])


def _table_8(seeds: range) -> Lines:
    yield from _head("model", "varied", "value", "paper BF", "BF, free messages", "BF")
    cases: list[tuple[str, int, Setting, float]] = []
    for model, tensor, batch, by_stages in paper.TABLE_8_STAGES:
        for stages, speedup in by_stages.items():
            cases.append(("stages", stages, _plain(model, tensor, stages, batch), speedup))
    for model, tensor, stages, by_batch in paper.TABLE_8_BATCHES:
        for batch, speedup in by_batch.items():
            cases.append(("batch", batch, _plain(model, tensor, stages, batch), speedup))
    for varied, value, setting, speedup in cases:

        def measured(hop: bool, setting: Setting = setting) -> str:
            return f"{_mean(seeds, lambda seed: _modelled(setting, seed, hop).speedup(BF)):.2f}"

        yield _row(
            [setting.model, varied, value, f"{speedup:.2f}", measured(False), measured(True)]
        )


def _plain(model: str, tensor: int, stages: int, batch: int) -> Setting:
    """A setting of which only the speedup is printed."""
    return Setting(model, tensor, stages, 1, batch, 1.0, 1.0, 1.0)


TABLES: dict[str, Callable[[range], Lines]] = {
    "table3": _table_3,
    "table1": _speedups(paper.TABLE_1),
    "table2": _speedups(paper.TABLE_2),
    "table6": _table_6,
    "table7": _table_7,
    "table8": _table_8,
}
