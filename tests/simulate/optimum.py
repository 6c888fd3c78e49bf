"""The best possible makespan of a small batch, proved by OR-tools CP-SAT."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.sat.python import cp_model


def best_makespan(
    forward: Sequence[Sequence[int]],
    backward: Sequence[Sequence[int]],
    weight: Sequence[Sequence[int]] | None,
    *,
    limit: int,
    latency: int = 0,
) -> int:
    """Over all orders of the tasks, in microbatch order or not, that hold at most `limit`.

    Tables are [stage][microbatch]; with `weight`, `backward` is what is left without it.
    """
    stages, microbatches = len(forward), len(forward[0])
    model = cp_model.CpModel()
    horizon = sum(map(sum, (*forward, *backward, *(weight or ()))))
    horizon += 2 * stages * microbatches * latency
    makespan = model.new_int_var(0, horizon, "makespan")

    def interval(name: str, length: int) -> tuple[cp_model.IntVar, cp_model.IntervalVar]:
        start = model.new_int_var(0, horizon, name)
        model.add(start + length <= makespan)
        return start, model.new_fixed_size_interval_var(start, length, name)

    starts: dict[tuple[str, int, int], cp_model.IntVar] = {}
    for stage in range(stages):
        on_stage, held = [], []
        for m in range(microbatches):
            last, length = "B", backward[stage][m]
            tables = {"F": forward, "B": backward} | ({"W": weight} if weight else {})
            for kind, table in tables.items():
                starts[kind, stage, m], task = interval(f"{kind} {stage} {m}", table[stage][m])
                on_stage.append(task)
                last, length = kind, table[stage][m]
            size = model.new_int_var(0, horizon, "held")
            begin, end = starts["F", stage, m], starts[last, stage, m] + length
            held.append(model.new_interval_var(begin, size, end, "held"))
            if weight:
                model.add(starts["W", stage, m] >= starts["B", stage, m] + backward[stage][m])
        model.add_no_overlap(on_stage)
        model.add_cumulative(held, [1] * microbatches, limit)
    for m in range(microbatches):
        for stage in range(stages):
            done = starts["F", stage, m] + forward[stage][m]
            if stage + 1 < stages:
                model.add(starts["F", stage + 1, m] >= done + latency)
                back = starts["B", stage + 1, m] + backward[stage + 1][m]
                model.add(starts["B", stage, m] >= back + latency)
            else:
                model.add(starts["B", stage, m] >= done)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 30
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)
