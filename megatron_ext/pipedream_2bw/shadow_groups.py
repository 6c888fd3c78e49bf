"""A second process group of the same ranks, for an update that runs between tasks.

Tasks use tensor-parallel groups and the like in an order that all their ranks agree on. An update
comes between other tasks on each rank, so its collectives need groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

_shadows: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def make_shadows(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Make the second groups; all ranks of each call this at the same time, in the same order."""
    for group in groups:
        if group is None or group.size() == 1 or group in _shadows:
            continue
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="PIPEDREAM_2BW_UPDATE",
        )
        assert isinstance(made, dist.ProcessGroup)
        _shadows[group] = made


def shadow_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group for an update to use in place of `group`."""
    return _shadows.get(group, group)
