"""What backwards leave for weight-gradient tasks."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch

from megatron_ext.pipeline.weight_grad import WeightGradients


@pytest.mark.parametrize("layers", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_are_all_of_it_in_order(layers: int, pieces: int) -> None:
    gradients = WeightGradients(torch.nn.Identity())
    done: list[tuple[int, int]] = []
    for microbatch in range(2):
        for layer in range(layers):
            gradients.put(functools.partial(done.append, (microbatch, layer)))
        gradients.seal()
    complete, counts = [], []
    for _ in range(2 * pieces):
        before = len(done)
        complete.append(gradients.run(last=False, pieces=pieces))
        counts.append(len(done) - before)
    assert done == [(microbatch, layer) for microbatch in range(2) for layer in range(layers)]
    assert complete == ([False] * (pieces - 1) + [True]) * 2
    assert max(counts) - min(counts) <= 1


def test_operands_go_with_their_piece() -> None:
    class Operand:
        pass

    gradients = WeightGradients(torch.nn.Identity())
    alive = []
    for _ in range(2):
        operand = Operand()
        alive.append(weakref.ref(operand))
        gradients.put(functools.partial(id, operand))
        del operand
    gradients.seal()
    gradients.run(last=False, pieces=2)
    assert [one() is None for one in alive] == [True, False]
