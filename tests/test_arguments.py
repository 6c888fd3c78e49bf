from __future__ import annotations

import argparse

import pytest

from megatron_ext.arguments import RrfpConfig, add_arguments, complete, describe, rrfp_config
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
        hint="bfw-depth", live_limit=None, transport="auto", timeout_s=600.0
    )
    assert describe(RrfpConfig()).startswith("hint bfw-depth, live_limit p, ")


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
