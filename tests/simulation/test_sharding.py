"""Simulated ranks decide together how DTensor shards the result of an operator."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import echelon

PROPAGATOR = DTensor._op_dispatcher.sharding_propagator


@pytest.fixture
def lengths():
    """Returns the lengths of lists that DTensor itself decides on."""
    return []


@pytest.fixture
def decided(monkeypatch, lengths):
    """Returns the list of operators that DTensor itself decides on."""
    found = []
    decide = type(PROPAGATOR).propagate_op_sharding_non_cached

    def record(self, schema):
        found.append(str(schema.op))
        lengths.extend(len(each) for each in schema.args_schema if isinstance(each, list | tuple))
        return decide(self, schema)

    monkeypatch.setattr(type(PROPAGATOR), "propagate_op_sharding_non_cached", record)
    return found


def mesh_of_all():
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def product():
    mesh = mesh_of_all()
    inputs, weights = torch.arange(24.0).view(4, 6), torch.arange(18.0).view(6, 3)
    result = distribute_tensor(inputs, mesh, [Shard(0)]) @ distribute_tensor(weights, mesh, [Replicate()])
    assert result.device_mesh is mesh
    return result.to_local()


def test_ranks_decide_once_and_each_has_its_own_mesh_and_part(decided):
    parts = echelon.simulate(product, 4).results
    assert torch.equal(torch.cat(parts), torch.arange(24.0).view(4, 6) @ torch.arange(18.0).view(6, 3))
    assert decided.count("aten.mm.default") == 1


def test_two_meshes_of_one_shape_in_a_world_share_decisions(decided):
    def program():
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        doubled = distribute_tensor(torch.ones(4), mesh, [Shard(0)]) * 2
        assert doubled.device_mesh is mesh
        return doubled.full_tensor().tolist()

    assert echelon.simulate(program, 4).results == [[2.0] * 4] * 4
    assert decided.count("aten.mul.Tensor") == 1


@pytest.mark.usefixtures("decided")
def test_equal_elements_of_lists_are_decided_on_once(lengths):
    def program():
        mesh = mesh_of_all()

        def spread(sizes, placement):
            return [distribute_tensor(torch.arange(float(size)), mesh, [placement]) for size in sizes]

        sums = torch._foreach_add(spread((6, 4, 6, 4, 6), Shard(0)), spread((6, 4, 6, 4, 6), Replicate()))
        torch._foreach_mul_(sums, [1.0, 2.0, 1.0, 3.0, 1.0])
        assert all(each.placements == (Shard(0),) and each.device_mesh is mesh for each in sums)
        assert torch._foreach_add(spread((6, 6), Shard(0)), 1.0)[0] is not sums[0]
        return [each.full_tensor().tolist() for each in sums]

    expected = [
        [2.0 * factor * value for value in range(size)] for size, factor in ((6, 1), (4, 2), (6, 1), (4, 3), (6, 1))
    ]
    assert echelon.simulate(program, 2).results == [expected] * 2
    assert lengths == [2, 2, 3, 3, 1]


def test_each_rank_has_the_sizes_of_its_own_shard():
    def program():
        tensor = distribute_tensor(torch.arange(20.0).view(5, 4), mesh_of_all(), [Shard(0)])
        return tensor.view(5, 2, 2).to_local().shape[0], tensor.new_zeros(5, 4).to_local().shape[0]

    assert echelon.simulate(program, 2).results == [(3, 3), (2, 2)]


def test_dtensor_decides_by_itself_afterwards():
    cache = PROPAGATOR.propagate_op_sharding
    echelon.simulate(product, 2)
    assert PROPAGATOR.propagate_op_sharding is cache
    assert "propagate_op_sharding_non_cached" not in vars(PROPAGATOR)
