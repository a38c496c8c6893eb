"""Assignment of elements to ranks, and the layout and manifest of their files, over random tensors."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.checkpoint.files.layout import DTYPES, Entry, Part
from echelon.checkpoint.files.manifest import BLOCK, Manifest, StoredFile, Tensors, content_of, decode, encode
from echelon.checkpoint.ranks.assignment import assign
from echelon.errors import CheckpointError

_SIZES = st.one_of(st.integers(0, 5), st.integers(100, 3000))


@st.composite
def worlds(draw):
    """Returns tensors, and the parts that each rank holds: together all elements, many of them several times."""
    num_ranks = draw(st.integers(1, 5))
    entries = draw(
        st.dictionaries(
            st.text(min_size=1, max_size=6),
            st.builds(Entry, st.sampled_from(sorted(DTYPES)), st.lists(_SIZES, max_size=3).map(tuple)),
            max_size=6,
        )
    )
    held = [[] for _ in range(num_ranks)]
    for name, entry in entries.items():
        cuts = sorted({0, entry.numel, *draw(st.lists(st.integers(0, entry.numel), max_size=3))})
        for start, stop in pairwise(cuts):
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                held[rank].append(Part(name, start, stop))
    return entries, held


def elements(parts):
    return {name: sorted((start, stop) for each, start, stop in parts if each == name) for name, _, _ in parts}


@given(worlds())
@settings(max_examples=50, deadline=None)
def test_each_element_is_stored_once_by_a_holder(world):
    entries, held = world
    stored = assign(entries, held)
    for name, ranges in elements([part for parts in stored for part in parts]).items():
        assert ranges[0][0] == 0
        assert ranges[-1][1] == entries[name].numel
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
    for parts, mine in zip(stored, held, strict=True):
        for name, start, stop in parts:
            assert any(part.name == name and part.start <= start < part.stop for part in mine)
            assert any(part.name == name and part.start < stop <= part.stop for part in mine)
    assert {name for parts in stored for name, _, _ in parts} == {name for name in entries if entries[name].numel}


@given(worlds())
@settings(max_examples=30, deadline=None)
def test_a_manifest_comes_back(world):
    entries, held = world
    tensors = Tensors.assigned(entries, assign(entries, held))
    files = tuple(StoredFile(layout.size, (7,) * -(-layout.size // BLOCK)) for layout in tensors.layouts)
    manifest = Manifest(3, None, {"format": 1}, {"dp": 2}, tensors, {"a": [1, None]}, [{} for _ in held], files)
    back = decode(encode(content_of(manifest)))
    assert back.tensors.entries == entries
    assert back.tensors.pieces == tensors.pieces
    assert back.tensors.layouts == tensors.layouts
    assert (back.step, back.data, back.files) == (3, {"a": [1, None]}, files)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_replicas_share_evenly_beside_parts_of_one_rank(num_ranks):
    """Rank 0 alone holds an eighth: the replicas' bytes make up for it."""
    entries = {"mine": Entry("float32", (1 << 20,)), "ours": Entry("float16", (1 << 11, 1 << 13))}
    every = [Part("ours", 0, 1 << 24)]
    stored = assign(entries, [[Part("mine", 0, 1 << 20), *every], *[every] * (num_ranks - 1)])
    loads = [sum((part.stop - part.start) * entries[part.name].itemsize for part in parts) for parts in stored]
    assert max(loads) - min(loads) <= 2 << 14 if num_ranks < 8 else loads[0] - min(loads) < 2 << 18
    rows = [part for parts in stored for part in parts if part.name == "ours"]
    assert all(part.start % (1 << 13) == part.stop % (1 << 13) == 0 for part in rows)


def test_elements_that_nobody_holds_are_named():
    entries = {"a": Entry("int8", (10,))}
    with pytest.raises(CheckpointError, match="no rank holds elements 4 to 6 of a"):
        assign(entries, [[Part("a", 0, 4)], [Part("a", 6, 10)]])
