from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from megatron_ext.arguments import (
    RrfpConfig,
    add_arguments,
    complete,
    describe,
    pipedream_2bw_config,
    rrfp_config,
)
from megatron_ext.errors import UsageError


def parse(*words: str, depth: int = 4, **megatron: object) -> argparse.Namespace:
    args = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(list(words))
    args.pipeline_model_parallel_size = depth
    vars(args).update(megatron)
    return args


def test_off_by_default() -> None:
    assert rrfp_config(parse()) is None


def test_layers_that_are_not_split_get_a_hint_that_does_not_count_on_it() -> None:
    config = rrfp_config(
        parse("--pipeline-schedule", "rrfp", transformer_impl="transformer_engine")
    )
    assert config == RrfpConfig(hint="bf")


def test_defaults() -> None:
    assert rrfp_config(parse("--pipeline-schedule", "rrfp")) == RrfpConfig()
    assert RrfpConfig() == RrfpConfig(
        hint="bfw-pieces", live_limit=None, transport="auto", timeout_s=600.0
    )
    assert describe(RrfpConfig()).startswith("hint bfw-pieces, live_limit p, ")


def test_every_flag_reaches_the_configuration() -> None:
    flags = "--rrfp-hint bf --rrfp-live-limit 1.5p --rrfp-transport gloo --rrfp-timeout 9"
    config = rrfp_config(parse("--pipeline-schedule", "rrfp", *flags.split()))
    assert config == RrfpConfig(hint="bf", live_limit="1.5p", transport="gloo", timeout_s=9)
    assert describe(config) == "hint bf, live_limit 1.5p, transport gloo, timeout_s 9.0"


@pytest.mark.parametrize(
    ("words", "megatron", "named"),
    [
        ([], {"depth": 1}, "--pipeline-model-parallel-size"),
        (["--rrfp-live-limit", "0"], {}, "--rrfp-live-limit"),
        (["--rrfp-timeout", "0"], {}, "--rrfp-timeout"),
        (["--rrfp-timeout", "nan"], {}, "--rrfp-timeout"),
        (["--rrfp-hint", "bwf"], {}, "--rrfp-hint: no hint 'bwf'"),
        ([], {"moe_router_load_balancing_type": ["global_aux_loss"]}, "global_aux_loss"),
        ([], {"mtp_num_layers": 1}, "--mtp-num-layers"),
        ([], {"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ([], {"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
    ],
)
def test_refusals_name_the_flag(words: list[str], megatron: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as refusal:
        rrfp_config(parse("--pipeline-schedule", "rrfp", *words, **megatron))  # type: ignore[arg-type]
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_off_in_megatron_is_not_refused() -> None:
    off = {
        "virtual_pipeline_model_parallel_size": None,
        "tensor_model_parallel_size": 1,
        "cuda_graph_impl": "none",
        "delay_wgrad_compute": False,
    }
    assert rrfp_config(parse("--pipeline-schedule", "rrfp", **off))  # type: ignore[arg-type]


def test_flags_come_along_where_megatron_reads_its_arguments_from_a_file() -> None:
    args = argparse.Namespace(pipeline_model_parallel_size=2)
    complete(args, ["--yaml-cfg", "run.yaml", "--pipeline-schedule", "rrfp"])
    assert rrfp_config(args) == RrfpConfig()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pipeline_schedule": "megatron"}, "--pipedream-2bw needs --pipeline-schedule rrfp"),
        ({"rrfp_hint": "1f1b"}, "--pipedream-2bw does not go with --rrfp-hint 1f1b"),
        ({"overlap_param_gather": True}, "--pipedream-2bw does not support --overlap-param-gather"),
        ({"fp16": True, "pipedream_2bw_clip": "off"}, "does not go with --fp16"),
        ({"pipedream_2bw_error_feedback": -1.0}, "--pipedream-2bw-error-feedback -1.0"),
        ({"pipedream_2bw_start_iteration": "soon"}, "--pipedream-2bw-start-iteration soon"),
        ({"pipedream_2bw_start_iteration": "1.5"}, "is a fraction of --train-iters"),
        ({"pipedream_2bw_end_iteration": "0"}, "--pipedream-2bw-end-iteration 0 is not after"),
        ({"pipedream_2bw": False, "pipedream_2bw_clip": "off"}, "does nothing without"),
    ],
)
def test_two_weight_versions_are_checked(changes: dict[str, Any], complaint: str) -> None:
    args = _parse_2bw()
    vars(args).update(changes)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        pipedream_2bw_config(args)


def test_a_fraction_of_the_run() -> None:
    args = _parse_2bw(
        "--pipedream-2bw-start-iteration", "0.1", "--pipedream-2bw-end-iteration", "9"
    )
    config = pipedream_2bw_config(args)
    assert config is not None
    assert (config.start_iteration, config.end_iteration) == (2, 9)


def _parse_2bw(*flags: str) -> argparse.Namespace:
    words = ("--pipeline-schedule", "rrfp", "--pipedream-2bw", *flags)
    return parse(*words, fp16=False, train_iters=20)
