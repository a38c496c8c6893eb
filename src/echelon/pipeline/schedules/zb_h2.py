"""ZB-H2: ZB-H1 with twice the warm-up, which closes the gap before the first backward (Qi et al., 2024, section 2.3).

3 ranks, 6 microbatches:

    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    rank 1      1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
    rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
"""

from __future__ import annotations

from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.split_backward import split_backward


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-H2 schedule. Every rank holds 2 num_ranks - 1 microbatches."""
    return split_backward("zb-h2", num_ranks, num_microbatches, per_hop=2)
