"""ZB-H1: 1F1B with the backward split; weight gradients fill the drain (Qi et al., 2024, section 2.2).

3 ranks, 4 microbatches:

    rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""

from __future__ import annotations

from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.split_backward import split_backward


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-H1 schedule. Every rank holds num_ranks microbatches, as 1F1B's first rank does."""
    return split_backward("zb-h1", num_ranks, num_microbatches, per_hop=1)
