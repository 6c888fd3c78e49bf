"""Megatron takes the flags of the shipped job files at their full size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.ranks import check_ranks, run_ranks
from tests.slurm.small_jobs import FAMILY_FILE, MUON_FILE, RRFP_FILE, training_flags
from tests.training import REPOSITORY

# file, variables, nodes, and tensor, pipeline and data parallelism
JOBS = [
    (RRFP_FILE, {"LAYOUT": "pp32"}, 16, (2, 32, 2)),
    (RRFP_FILE, {"LAYOUT": "pp64"}, 16, (2, 64, 1)),
    (MUON_FILE, {}, 8, (2, 16, 2)),
    (FAMILY_FILE, {"SLURM_ARRAY_TASK_ID": "3"}, 1, (1, 1, 8)),
]


@pytest.mark.parametrize(
    ("file", "variables", "nodes", "layout"), JOBS, ids=["pp32", "pp64", "2bw-muon", "family"]
)
def test_flags_fit_megatron(
    tmp_path: Path,
    file: Path,
    variables: dict[str, str],
    nodes: int,
    layout: tuple[int, int, int],
) -> None:
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    given = {"REPO": str(REPOSITORY), "SCRIPT": script, "PYTHON": sys.executable}
    given |= {"DATA_PATH": "text", "RUN_DIR": str(tmp_path), **variables}
    flags = training_flags(file, given, nodes)
    answer = tmp_path / "layout.json"
    size = {"WORLD_SIZE": str(nodes * 8), "LOCAL_WORLD_SIZE": "8"}
    check_ranks(run_ranks(1, _validate, flags, str(answer), environment=size))
    found = json.loads(answer.read_text())
    assert tuple(found["layout"]) == layout
    assert found["bf16"]


def _validate(rank: int, flags: list[str], answer: str) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as the jobs set it
    from megatron.training.arguments import validate_args

    from megatron_ext import arguments, hooks
    from megatron_ext.hook import install

    install(hooks.ARGUMENT_HOOKS)
    from megatron.training.arguments import parse_args  # the hooked one

    sys.argv = ["pretrain_gpt.py", *flags]
    args = parse_args()
    validate_args(args, {})
    arguments.rrfp_config(args)
    arguments.pipedream_2bw_config(args)
    layout = [
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.data_parallel_size,
    ]
    Path(answer).write_text(json.dumps({"layout": layout, "bf16": args.bf16}))
