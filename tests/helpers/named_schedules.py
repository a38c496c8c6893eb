"""The named schedules for tests: which sizes each has."""

from __future__ import annotations

from hypothesis import strategies as st

from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules import build, names

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
CHUNKED = ("interleaved-1f1b", "looped-bfs", "forward-only")


def sizes_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[int, int, int]:
    """Bends sizes into some that the schedule has."""
    if name not in CHUNKED:
        num_chunks = 2 if name in V_SHAPED else 1
    if name == "dualpipe-v":
        num_microbatches = max(num_microbatches, 2 * num_ranks)
    return num_ranks, num_microbatches, num_chunks


def schedules(
    min_ranks: int = 1, max_ranks: int = 8, max_microbatches: int = 32, among: tuple[str, ...] = ()
) -> st.SearchStrategy[Schedule]:
    """Any named schedule, 1 to 8 ranks x 1 to 32 microbatches x 1 to 4 chunks."""
    return st.builds(
        lambda name, ranks, microbatches, chunks: build(name, *sizes_of(name, ranks, microbatches, chunks)),
        st.sampled_from(among or names()),
        st.integers(min_ranks, max_ranks),
        st.integers(1, max_microbatches),
        st.integers(1, 4),
    )
