"""Console logs as Megatron really writes them, several ranks into one pipe."""

from __future__ import annotations

import math

from megatron_ext.training_log import (
    IterationReport,
    parse_parameter_counts,
    parse_training_log,
)

# From a run of Megatron 0.19.2 with four stages, as it came out of the pipe.
LOG = """\
WARNING: one_logger package is required to enable e2e metrics tracking.
  override_ckpt_iteration ......................... None
 > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank (0, 0, 1): 223680
 > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank (0, 0, 3): 260736
 > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank (0, 0, 2): 223680
 > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank (0, 0, 0): 272832
Overwriting rerun_state_machine.current_iteration from -1 to 0...
 [2026-11-30 20:51:24.357766] iteration        1/      40 | consumed samples:           32 | \
elapsed time per iteration (ms): 783.6 | learning rate: 2.995838E-03 | global batch size:    32 | \
lm loss: 5.785645E+00 | loss scale: 1.0 | grad norm: 8.122 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
Number of parameters in transformer block in billions:  0.00 [2026-11-30 20:51:24.958500] \
iteration        2/      40 | consumed samples:           64 | elapsed time per iteration (ms): \
691.9 | learning rate: 2.983379E-03 | global batch size:    32 | lm loss: 5.581790E+00 | loss \
scale: 1.0 | grad norm: 3.364 | number of skipped iterations:   0 | number of nan iterations:   0 \
|[Rank 1] (after 2 iterations) memory (MB) | allocated: 0.00 | max allocated: 0.00
"""  # noqa: E501

# Megatron 0.17 names the ranks like this.
OLDER = " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 49"


def test_reports_are_found_between_and_behind_other_output() -> None:
    assert parse_training_log(LOG.splitlines()) == [
        IterationReport(iteration=1, loss=5.785645, grad_norm=8.122, time_ms=783.6),
        IterationReport(iteration=2, loss=5.581790, grad_norm=3.364, time_ms=691.9),
    ]


def test_a_skipped_iteration_has_no_loss_and_nan_is_kept() -> None:
    line = LOG.splitlines()[7]
    skipped = line.replace(" lm loss: 5.785645E+00 |", "").replace(" grad norm: 8.122 |", "")
    (report,) = parse_training_log([skipped])
    assert (report.loss, report.grad_norm) == (None, None)
    (report,) = parse_training_log([line.replace("5.785645E+00", "NAN")])
    assert report.loss is not None
    assert math.isnan(report.loss)


def test_a_cut_line_is_no_report() -> None:
    assert parse_training_log([LOG.splitlines()[7][:60]]) == []


def test_parameters_of_every_stage() -> None:
    assert parse_parameter_counts(LOG.splitlines()) == [223680, 260736, 223680, 272832]
    assert parse_parameter_counts([OLDER]) == [49]
