"""The flags of the watch over a training: defaults, and what does not fit together."""

from __future__ import annotations

import argparse
import shlex

import pytest

from megatron_ext.arguments import CollapseConfig, add_arguments, collapse_config
from megatron_ext.errors import UsageError

GIVEN = "--collapse-reference a.json b.json"


def parse(words: str) -> CollapseConfig | None:
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return collapse_config(parser.parse_args(shlex.split(words)))


def test_defaults() -> None:
    assert parse("") is None
    assert parse(GIVEN) == CollapseConfig(references=("a.json", "b.json"))


def test_everything() -> None:
    config = parse(
        f"{GIVEN} --collapse-window 0.1-0.4 --collapse-expected-final-loss 2.5 "
        "--collapse-false-alarm-rate 0.001 --collapse-action stop --collapse-force"
    )
    assert config == CollapseConfig(
        references=("a.json", "b.json"),
        window=(0.1, 0.4),
        align="expected",
        false_alarm_rate=0.001,
        action="stop",
        expected_final_loss=2.5,
        force=True,
    )


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--collapse-align early", "--collapse-align"),
        ("--collapse-expected-final-loss 3", "--collapse-expected-final-loss"),
        (f"{GIVEN} --collapse-window x", "--collapse-window"),
        (f"{GIVEN} --collapse-window 0.5-0.2", "--collapse-window"),
        (f"{GIVEN} --collapse-false-alarm-rate 1", "--collapse-false-alarm-rate"),
        (f"{GIVEN} --collapse-expected-final-loss -1", "--collapse-expected-final-loss"),
        (f"{GIVEN} --collapse-align expected", "--collapse-align expected"),
        (f"{GIVEN} --collapse-align early --collapse-expected-final-loss 3", "--collapse-align"),
        ("--collapse-reference a.json --collapse-align power-law", "power-law"),
    ],
)
def test_what_does_not_fit(words: str, flag: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(words)
    assert flag in str(error.value)
    assert "\n" not in str(error.value)
