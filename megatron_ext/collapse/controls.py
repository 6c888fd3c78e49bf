"""What decides the shape of a loss curve: schedule, tokens per parameter (TPP) and tau.

tau = B / (eta lambda D), with batch B and training length D in tokens, peak learning rate eta and
AdamW's weight decay lambda: its averaging time over the training time (arXiv 2505.13738).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ext.collapse.history import History
from megatron_ext.collapse.schedule import (
    STYLES,
    NamedSchedule,
    Schedule,
    parse_schedule,
    sample_schedule,
)
from megatron_ext.errors import UsageError

_SIZE = re.compile(
    r"^\s*([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([kmbt])?(?:illion)?\s*$", re.IGNORECASE
)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Controls:
    """The controls of a run; None is unknown.

    Attributes:
        params: number of parameters N.
        params_error: relative error of `params`: a label such as ``1B`` is rounded.
        tokens: training length D, in tokens.
        steps: training length in steps.
        batch_tokens: batch B, in tokens.
        lr_peak: peak learning rate eta, as the optimizer sees it.
        weight_decay: lambda.
        schedule: the learning rate over training.
        given_tpp: TPP as stated, where it is not D / N.
        given_tau: tau as stated, where it is not B / (eta lambda D).
    """

    params: float | None = None
    params_error: float = 0.0
    tokens: float | None = None
    steps: float | None = None
    batch_tokens: float | None = None
    lr_peak: float | None = None
    weight_decay: float | None = None
    schedule: Schedule | None = None
    given_tpp: float | None = None
    given_tau: float | None = None

    @property
    def tpp(self) -> float | None:
        """Tokens per parameter, D / N."""
        if self.given_tpp is not None:
            return self.given_tpp
        return None if self.tokens is None or not self.params else self.tokens / self.params

    @property
    def tau(self) -> float | None:
        """AdamW's averaging time over the training time; infinite without weight decay."""
        if self.given_tau is not None:
            return self.given_tau
        if self.weight_decay is None or self.tau_lambda is None:
            return None
        return self.tau_lambda / self.weight_decay if self.weight_decay else math.inf

    @property
    def tau_lambda(self) -> float | None:
        """Tau times weight decay: what is left to compare where the decay is not known."""
        if not self.batch_tokens or not self.lr_peak or not self.tokens:
            return None
        return self.batch_tokens / (self.lr_peak * self.tokens)

    def with_given(self, given: Controls) -> Controls:
        """These controls with what `given` knows in its place."""
        known = {name: value for name, value in vars(given).items() if value is not None}
        if given.params is None:
            known.pop("params_error")
        return replace(self, **known)


def controls_of(history: History) -> tuple[Controls, list[str]]:
    """Read the controls from what came with a history.

    Returns:
        The controls, and notes on what was left out or derived.
    """
    texts = {_key(name): text for name, text in history.metadata.items()}
    notes: list[str] = []
    params, params_error = _params(texts)
    batch = _first_number(texts, "batch_tokens", "global_batch_tokens", "tokens_per_step")
    sequences = _first_number(texts, "global_batch_size", "batch_sequences", "batch_size")
    length = _first_number(texts, "seq_length", "sequence_length", "seq_len", "context_length")
    if batch is None and sequences and length:
        batch = sequences * length
    tokens = None
    if history.tokens is not None and history.steps[-1] > 0:
        last = float(history.tokens[-1])
        tokens = last * max(1.0, history.end / float(history.steps[-1]))
        batch = batch or last / float(history.steps[-1])
    elif batch:
        tokens = batch * history.end
    lr_peak = _first_number(texts, "lr_peak", "peak_lr", "max_lr", "lr", "learning_rate")
    schedule: Schedule | None = _megatron_schedule(texts, lr_peak)
    schedule = schedule or _stated_schedule(texts, history.end)
    rates = history.extras.get("lr")
    if rates is not None and schedule is None:
        schedule, left_out = sample_schedule(history.fractions, rates, lr_peak)
        if left_out:
            notes.append(f"{left_out} learning rates far above the peak left out")
        if lr_peak is None and schedule is not None:
            lr_peak = float(rates[rates == rates].max())
    return (
        Controls(
            params=params,
            params_error=params_error,
            tokens=tokens,
            steps=history.end,
            batch_tokens=batch,
            lr_peak=lr_peak,
            weight_decay=_first_number(texts, "weight_decay", "wd"),
            schedule=schedule,
        ),
        notes,
    )


def parse_size(text: str) -> tuple[float, float] | None:
    """Read a number of parameters: ``124M``, ``1.3B``, ``123587328``.

    Returns:
        The number and its relative error, which is half of the last digit shown; None for
        anything else.
    """
    match = _SIZE.match(text)
    if match is None:
        return None
    number = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if not 0 < number < 1e18:
        return None
    if not match[2]:
        return number, 0.0
    digits = len(match[1].lower().partition("e")[0].partition(".")[2])
    return number, 0.5 * 10.0**-digits * _UNITS[match[2].lower()] / number


def positive(value: float | None, flag: str) -> float | None:
    """`value`, if it is a positive finite number or None.

    Raises:
        UsageError: It is neither; `flag` is named.
    """
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} {value} is not a positive number")
    return value


def _params(texts: Mapping[str, str]) -> tuple[float | None, float]:
    for name in ("params", "parameters", "num_params", "n_params", "size", "model_size", "model"):
        found = parse_size(texts.get(name, ""))
        if found is not None:
            return found
    return None, 0.0


def _first_number(texts: Mapping[str, str], *names: str) -> float | None:
    """The first of these settings that is a finite number of at least 0."""
    for name in names:
        try:
            number = float(texts.get(name, ""))
        except ValueError:
            continue
        if math.isfinite(number) and (number > 0 or name in ("weight_decay", "wd")):
            return number if number >= 0 else None
    return None


def _megatron_schedule(texts: Mapping[str, str], peak: float | None) -> NamedSchedule | None:
    """The schedule that Megatron's arguments describe."""
    style = texts.get("lr_decay_style", "").lower()
    iterations = _first_number(texts, "train_iters")
    if style not in STYLES or not iterations or not peak:
        return None
    # Megatron decays over its own length, beyond which the rate stays at the least.
    decay_length = (_first_number(texts, "lr_decay_iters") or iterations) / iterations
    if abs(decay_length - 1) > 0.01:
        return None
    fraction = _first_number(texts, "lr_warmup_fraction")
    warmup = fraction or (_first_number(texts, "lr_warmup_iters") or 0.0) / iterations
    return NamedSchedule(
        style,
        warmup=min(warmup, 0.99),
        floor=min((_first_number(texts, "min_lr") or 0.0) / peak, 1.0),
        decay=min((_first_number(texts, "lr_wsd_decay_iters") or 0.0) / iterations, 1.0),
    )


def _stated_schedule(texts: Mapping[str, str], end: float) -> NamedSchedule | None:
    """A schedule that a column states by name, with another for the warm-up."""
    stated = texts.get("schedule", texts.get("lr_schedule", "")).lower()
    style = next((style for style in ("cosine", "linear") if style == stated), None)
    if style is None and stated.endswith("-linear"):
        style = "linear"
    if style is None:
        return None
    warmup = _first_number(texts, "warmup", "warmup_steps") or 0.0
    if warmup >= 1:
        warmup /= end
    return parse_schedule(style, warmup=min(warmup, 0.99))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
