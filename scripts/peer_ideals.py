"""What each schedule of `bench_peers.py` would take if messages and overhead took no time."""

from __future__ import annotations

from typing import Any

from emulated_stage import Work

from megatron_ext.simulate.job import Job
from megatron_ext.simulate.pipeline import Pipeline
from megatron_ext.simulate.pipeline import Policy as Simulated
from megatron_ext.simulate.task_times import TaskTimes

Order = dict[int, list[Any]]
"""PyTorch's own list of actions, by rank."""


def simulated_s(work: Work, hint: str, live_limit: str | None) -> float:
    """Seconds under our arbiter and a hint; ``1f1b`` at ``p`` is Megatron's order."""
    ranks, chunks, microbatches = work.forward.shape
    rows = (ranks * chunks, microbatches)
    times = TaskTimes(
        work.forward.reshape(rows),
        (work.backward + work.weight).reshape(rows),
        work.weight.reshape(rows),
    )
    job = Job(Pipeline(ranks, microbatches, chunks), given=times)
    return float(job.run(job.draw(0), Simulated(hint, live_limit)).makespan)


def ordered_s(work: Work, order: Order, v_shaped: bool) -> float:
    """Seconds if every rank runs its list in order, each action as soon as its input is there.

    Raises:
        ValueError: The lists wait for each other.
    """
    ranks, chunks, _ = work.forward.shape
    last = ranks * chunks - 1
    lists = {rank: list(_compute(actions)) for rank, actions in order.items()}
    at, free = dict.fromkeys(lists, 0), dict.fromkeys(lists, 0.0)
    done: dict[tuple[bool, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in lists.items():
            while at[rank] < len(actions):
                kind, stage, microbatch = actions[at[rank]]
                forward = kind == "FORWARD"
                needs = None
                if forward and stage > 0:
                    needs = (True, stage - 1, microbatch)
                elif not forward and kind != "BACKWARD_WEIGHT":
                    needs = (stage == last, min(stage + 1, last), microbatch)
                if needs is not None and needs not in done:
                    break
                chunk = (1 if stage >= ranks else 0) if v_shaped else stage // ranks
                where = (rank, chunk, microbatch)
                seconds = {
                    "FORWARD": work.forward[where],
                    "BACKWARD_INPUT": work.backward[where],
                    "BACKWARD_WEIGHT": work.weight[where],
                    "FULL_BACKWARD": work.backward[where] + work.weight[where],
                }[kind]
                free[rank] = max(free[rank], done.get(needs, 0.0) if needs else 0.0) + seconds
                if kind != "BACKWARD_WEIGHT":
                    done[forward, stage, microbatch] = free[rank]
                at[rank] += 1
                moved = True
    if any(at[rank] < len(actions) for rank, actions in lists.items()):
        raise ValueError("this order of actions never ends")
    return float(max(free.values()))


def _compute(actions: list[Any]) -> Any:
    """The actions that compute, as (kind, stage, microbatch); overlapped ones one by one."""
    kinds = ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FULL_BACKWARD")
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type.name in kinds:
                yield part.computation_type.name, part.stage_index, part.microbatch_index
