"""Lets an unmodified Megatron train on CPU and gloo: what ``--cpu`` turns on.

Megatron names CUDA in many places where it only means "the training device": ``device="cuda"``,
``.cuda()``, ``torch.cuda.current_device()``, streams, events, random-state functions. `enable`
answers those calls with their CPU meaning, in PyTorch, not in Megatron: functions that make or
move tensors take a CUDA device for the CPU, and a table of ``torch.cuda`` functions gets
stand-ins. It must run before Megatron is imported, because Megatron binds some of these names at
import.

Nothing here runs unless ``--cpu`` was given. ``torch.cuda.is_available()`` keeps saying False.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_enabled = False


def enable() -> None:
    """Make PyTorch answer CUDA requests on the CPU, for the rest of this process.

    Safe to call more than once. Call it before the first import of Megatron.
    """
    global _enabled
    if _enabled:
        return
    _enabled = True
    # Megatron compiles its fused element-wise functions; on the CPU that costs more than it saves.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.compile = _compile_nothing
    for name, stand_in in _stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _returning(None))
    torch.distributed.init_process_group = _without_device(torch.distributed.init_process_group)
    _share_gloo_thread()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_one_generator)
    _rewrite_devices()


def enabled() -> bool:
    """Whether `enable` has run in this process."""
    return _enabled


def adjust_arguments(args: argparse.Namespace) -> list[str]:
    """Turn off what needs a GPU in parsed, not yet validated, Megatron arguments.

    Args:
        args: Megatron's namespace; changed in place. Names that this Megatron lacks are skipped.

    Returns:
        The changes as flags, for one line in the log.
    """
    changes: list[str] = []
    for name, value, flag in _CPU_ARGUMENTS:
        if hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            changes.append(flag)
    return changes


# (attribute, value on CPU, the flag that says the same)
_CPU_ARGUMENTS: tuple[tuple[str, object, str], ...] = (
    ("distributed_backend", "gloo", "--distributed-backend gloo"),
    ("transformer_impl", "local", "--transformer-impl local"),
    ("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"),
    ("masked_softmax_fusion", False, "--no-masked-softmax-fusion"),
    ("no_persist_layer_norm", True, "--no-persist-layer-norm"),
    ("apply_rope_fusion", False, "--no-rope-fusion"),
    # Worker processes of the data loader inherit none of the stand-ins in this file.
    ("num_workers", 0, "--num-workers 0"),
)


def _rewrite_devices() -> None:
    """Let every function that makes or moves tensors take a CUDA device for the CPU.

    Wrapping the functions costs nothing in the others, and holds in every thread; a
    `TorchFunctionMode` would slow down each call to PyTorch and hold only in this thread.
    """
    for function in cast("Iterable[Callable[..., Any]]", _device_constructors()):
        if getattr(torch, function.__name__, None) is function:
            setattr(torch, function.__name__, _with_cpu_device(function))
    tensor: Any = torch.Tensor
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(tensor, name, _with_cpu_device(getattr(tensor, name)))
    tensor.to = _moving_to_cpu(tensor.to)
    tensor.type = _with_cuda_type_names(tensor.type)
    tensor.cuda = tensor.pin_memory = lambda self, *_, **__: self


def _share_gloo_thread() -> None:
    """Let all gloo groups of this process be served by one thread.

    Each would start one of its own, which wakes a hundred times a second with nothing to do.
    Megatron makes about thirty groups: where ranks share cores, that takes a tenth of them.
    """
    from torch.distributed import distributed_c10d

    original: Any = distributed_c10d.ProcessGroupGloo
    device = functools.cache(original.create_default_device)

    class ProcessGroupGloo(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, *rest: Any, **named: Any) -> None:
            if rest or [name for name, value in named.items() if value] != ["timeout"]:
                super().__init__(store, rank, size, *rest, **named)  # a way of its own
                return
            options = original._Options()
            options._timeout = named["timeout"]
            options._devices = [device()]
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def _with_cpu_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return make


def _moving_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return to(self, *(_on_cpu(value) for value in args), **kwargs)

    return move


def _with_cuda_type_names(type_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_)
    def name_or_convert(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_(self, *args, **kwargs)
        # The optimizer and gradient clipping sort parameters by these names.
        return str(type_(self)).replace("torch.", "torch.cuda.", 1)

    return name_or_convert


def _on_cpu(device: Any) -> Any:
    """The CPU if `device` names a CUDA device, `device` itself otherwise."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.split(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


class _Stream:
    """A stream on a device that runs everything in order at once."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


class _Event:
    """An event on a device that runs everything in order at once: a time stamp."""

    def __init__(self, *_: object, **__: object) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._seconds - self._seconds) * 1e3


def _returning(value: object) -> Callable[..., object]:
    """A new function, each time another, that takes anything and returns `value`."""
    return lambda *_, **__: value


def _compile_nothing(model: Any = None, **_: object) -> Any:
    return model if model is not None else _compile_nothing


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.default_generator.set_state(state)


class _Device:
    """A context manager that would make a GPU the current one."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


# A major version of 10 and more spares the workarounds that Megatron asks of older GPUs.
_PROPERTIES = SimpleNamespace(
    name="cpu", major=10, minor=0, total_memory=0, multi_processor_count=1, warp_size=1
)


def _stand_ins() -> dict[str, object]:
    """What each ``torch.cuda`` name that Megatron uses becomes."""
    stream = _Stream()
    return {
        "device_count": _returning(1),
        "current_device": _returning(0),
        "set_device": _returning(None),
        "get_device_capability": _returning((_PROPERTIES.major, _PROPERTIES.minor)),
        "get_device_name": _returning("cpu"),
        "get_device_properties": _returning(_PROPERTIES),
        "synchronize": _returning(None),
        "empty_cache": _returning(None),
        "is_current_stream_capturing": _returning(False),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream=None: stream or _Stream(),
        "current_stream": _returning(stream),
        "default_stream": _returning(stream),
        "set_stream": _returning(None),
        "device": _Device,
        "default_generators": (torch.default_generator,),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "_lazy_init": _returning(None),
        "_lazy_call": lambda call, **_: call(),
        "memory_allocated": _returning(0),
        "max_memory_allocated": _returning(0),
        "memory_reserved": _returning(0),
        "max_memory_reserved": _returning(0),
        "device_memory_used": _returning(0),
        "reset_peak_memory_stats": _returning(None),
        "memory_stats": _returning(_NoStatistics()),
        "mem_get_info": _returning((0, 0)),
    }


class _NoStatistics(dict[str, int]):
    """Allocator statistics of a device without an allocator: every figure is 0."""

    def __missing__(self, key: str) -> int:
        return 0


def _without_device(init_process_group: Callable[..., None]) -> Callable[..., None]:
    def init(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init_process_group(*args, **kwargs)

    return init


def _one_generator(record: logging.LogRecord) -> bool:
    """Drop a warning that is always true here: CPU and "CUDA" share one random generator."""
    return "CPU RNG state changed" not in record.getMessage()
