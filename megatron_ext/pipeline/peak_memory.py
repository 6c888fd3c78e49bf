"""Peak memory of this rank: the device's where there is one, else that of the process."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_ext.pipeline.run_facts import MemoryReading

_STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> MemoryReading:
    """The figure to trace for a stage on `device`; it costs some microseconds to read."""
    if device.type == "cuda":
        return MemoryReading(
            "peak CUDA memory allocated", lambda: int(torch.cuda.max_memory_allocated(device))
        )
    return MemoryReading("peak resident memory of the process", resident_peak)


def resident_peak() -> int | None:
    """Most memory that this process ever had resident, in bytes; None where Linux is missing.

    Not `resource.getrusage`: its figure is that of the parent where this has less.
    """
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
