"""Nested values come apart and together again."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon
from echelon.pipeline.stage.nested import map_tensors, structure_of, tensors_of, value_of

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
tensors = st.integers(0, 99).map(lambda number: torch.tensor([number]))
values = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_structure_and_tensors_make_the_value_again(value):
    left = iter(tensors_of(value))
    again = value_of(structure_of(value), lambda _: next(left))
    assert repr(again) == repr(value)
    assert next(left, None) is None


def test_the_structure_says_which_tensors_require_a_gradient():
    value = (torch.ones(1, requires_grad=True), [torch.ones(1)])
    seen = []
    value_of(structure_of(value), lambda requires_grad: seen.append(requires_grad) or torch.ones(1))
    assert seen == [True, False]


def test_map_keeps_everything_but_the_tensors():
    value = {"a": (torch.ones(2), None), "b": [3, "x"]}
    assert map_tensors(lambda tensor: tensor.tolist(), value) == {"a": ([1.0, 1.0], None), "b": [3, "x"]}


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Box:
    inside: object


def test_inputs_and_outputs_may_hold_containers_of_other_types():
    value = Pair(Box([torch.ones(2), "x"]), OrderedDict(a=torch.zeros(1)))
    assert [tensor.tolist() for tensor in tensors_of(value)] == [[1.0, 1.0], [0.0]]
    assert map_tensors(torch.Tensor.tolist, value) == Pair(Box([[1.0, 1.0], "x"]), OrderedDict(a=[0.0]))
    for part in value:
        with pytest.raises(echelon.UnsupportedOp, match="cannot pass between stages"):
            structure_of([part])


def test_keys_may_be_numbers():
    value = {1: torch.ones(1), None: [2.5]}
    assert repr(value_of(structure_of(value), lambda _: torch.ones(1))) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, object(), {(3, 4): torch.ones(1)}, [torch.nn.Linear(1, 1)]])
def test_what_is_no_nested_value_is_refused_by_name(value):
    with pytest.raises(echelon.UnsupportedOp, match="pass"):
        structure_of(value)


@pytest.mark.parametrize("text", ["", "{", "3", '{"tuple": 3}', '{"a":1,"b":2}', "[1,2]", "[" * 100_000])
def test_a_structure_from_a_peer_is_not_trusted(text):
    with pytest.raises(echelon.ProtocolError):
        value_of(text, lambda _: torch.ones(1))
