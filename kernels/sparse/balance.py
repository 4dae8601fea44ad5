"""Keeps the lanes of a warp near each other in their stream, though each takes as many values as its mask words say.

The 32 lanes read 32 columns of values, each its own. Before every step the lanes may move on by some columns, all by
the same number, which gives a lane that took many the column of one that took few. What that leaves of lag is filled
with explicit zeros, so that no column is ever more than a chunk behind what is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 32
CHUNK = 32  # values of a column that arrive together
WINDOW = 2  # chunks of which values are read at a time
_SOFT = 3.0  # values by which a lead must grow to count e times as much
_ZERO_COST = 50.0  # of an explicit zero, in leads of average columns


@dataclass(frozen=True)
class Plan:
    """`rotations` uint8 [streams, steps]: lane l reads column (l + rotation) mod 32 in the step.

    `waits` uint8 [streams, steps]: chunks (0 or 1) to wait for before the step. `zeros` uint8 [streams, steps, 32]:
    explicit zeros that each lane takes in addition. `lengths` int32 [streams]: values of the longest column.
    """

    rotations: Tensor
    waits: Tensor
    zeros: Tensor
    lengths: Tensor


def balance(counts: Tensor) -> Plan:
    """A plan for lanes that take `counts` int32 [streams, steps, 32] values, at most 32 each.

    Step by step, the rotation with the lowest cost: the sum over columns of exp(lead) and the zeros it would need. The
    zeros go to the step before, which always has room: the chunk to wait for moves by one at most, a column was behind
    by no more than a chunk then, and a lane that took n of 32 values has 32 - n places left.
    """
    streams, steps, _ = counts.shape
    lanes = torch.arange(LANES, device=counts.device)
    turned = (lanes[None, :] - lanes[:, None]) % LANES  # [rotation, column]: the lane that reads it
    filled = counts.new_zeros(streams, LANES)  # values of each column so far
    needed = counts.new_zeros(streams)  # chunks waited for so far
    rotation = torch.zeros(streams, dtype=torch.int64, device=counts.device)
    rotations, waits = [], []
    zeros = torch.zeros(streams, steps, LANES, dtype=torch.uint8, device=counts.device)
    for step in range(steps):
        after = filled[:, None] + counts[:, step][:, turned]  # [streams, rotation, column]
        longest = after.amax(-1)
        chunks = torch.maximum((longest + CHUNK - 1) // CHUNK, needed[:, None])
        lacking = (CHUNK * (chunks - WINDOW)[..., None] - filled[:, None]).clamp_(min=0).sum(-1)
        lead = after.float() - after.float().mean(-1, keepdim=True)
        cost = lead.div_(_SOFT).clamp_(max=60).exp_().sum(-1) + _ZERO_COST * lacking
        if step == steps - 1:  # what counts at the end is the length
            cost = longest + 1e-4 * cost
        best = cost.argmin(1)
        chosen = chunks.gather(1, best[:, None]).squeeze(1)
        lag = (CHUNK * (chosen - WINDOW)[:, None] - filled).clamp_(min=0)
        if step > 0:
            by_lane = (lanes + rotation[:, None]) % LANES
            zeros[:, step - 1] = lag.gather(1, by_lane).to(torch.uint8)
        filled = filled + lag
        rotation = best
        columns = (lanes + rotation[:, None]) % LANES
        filled = filled.scatter_add(1, columns, counts[:, step])
        rotations.append(rotation.to(torch.uint8))
        waits.append((chosen - needed).to(torch.uint8))
        needed = chosen
    return Plan(torch.stack(rotations, 1), torch.stack(waits, 1), zeros, filled.amax(1))
