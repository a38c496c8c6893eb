"""Results of operators on fake tensors that are made again, beside FakeTensorMode's own."""

import pytest
import torch

from echelon._torch_private.fake_results import FakeResults
from echelon._torch_private.tensors import FakeTensor, recorded_tensors

aten = torch.ops.aten


def made():
    """Returns tensors of different forms, by name."""
    return {
        "rows": torch.empty(4, 6),
        "turned": torch.empty(6, 4).t(),
        "part": torch.empty(8, 6)[2:6],
        "half": torch.empty(4, 6, dtype=torch.bfloat16),
        "whole": torch.empty(4, 6, dtype=torch.int64),
        "conjugate": torch.empty(4, 6, dtype=torch.complex64).conj(),
        "widened": torch.empty(4, 1).expand(4, 6),
    }


CALLS = {
    "sum": lambda x: (aten.add.Tensor, (x, x)),
    "sum with a whole number": lambda x: (aten.add.Tensor, (x, 1)),
    "sum with a fraction": lambda x: (aten.add.Tensor, (x, 1.0)),
    "view": lambda x: (aten.slice.Tensor, (x, 0, 1, 3)),
    "alias without a view": lambda x: (aten.unsafe_split.Tensor, (x, 2)),
    "list of views": lambda x: (aten.split.Tensor, (x, 3, 1)),
    "copy or the tensor itself": lambda x: (aten.contiguous.default, (x,)),
    "tuple": lambda x: (aten.max.dim, (x.real if x.is_complex() else x, 1)),
    "list": lambda x: (aten._foreach_mul.Scalar, ([x, x], 2)),
    "in place": lambda x: (aten.mul_.Tensor, (x.contiguous(), 2)),
    "in place with another form": lambda x: (aten.t_.default, (x,)),
    "in a list in place": lambda x: (aten._foreach_zero_.default, ([torch.empty(x.shape, dtype=x.dtype)],)),
    "into a tensor": lambda x: (aten.add.out, (x, 1), {"out": torch.empty_like(x)}),
    "other type": lambda x: (aten._to_copy.default, (x,), {"dtype": torch.float16}),
    "other device": lambda x: (aten._to_copy.default, (x,), {"device": torch.device("meta")}),
}


def facts(out, args, kwargs):
    """Returns all that can be seen of a result."""
    if isinstance(out, tuple | list):
        return type(out), [facts(each, args, kwargs) for each in out]
    if out is None:
        return None
    given = [*args, *kwargs.values()]
    inputs = [each for value in given for each in (value if isinstance(value, list) else [value])]
    inputs = [each for each in inputs if isinstance(each, torch.Tensor)]
    assert type(out) is FakeTensor
    return (
        [each is out for each in inputs],
        [each.untyped_storage()._cdata == out.untyped_storage()._cdata for each in inputs],
        (out.shape, out.stride(), out.storage_offset(), out.dtype, out.device, out.untyped_storage().nbytes()),
        (out.is_conj(), out.is_neg(), out.requires_grad, sorted(vars(out))),
        [tuple(each.shape) for each in inputs],
    )


def called(run, call, name):
    func, args, *kwargs = call(made()[name])
    kwargs = kwargs[0] if kwargs else {}
    return facts(run(func, args, kwargs), args, kwargs)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_those_of_fake_tensor_mode(call):
    results = FakeResults()
    with recorded_tensors():
        for _ in range(3):
            for name in made():
                expected = called(lambda func, args, kwargs: func(*args, **kwargs), call, name)
                assert called(results.run, call, name) == expected, name


def test_a_tensor_given_twice_does_not_decide_which_one_is_returned():
    results = FakeResults()
    with recorded_tensors():
        first, other = torch.empty(4), torch.empty(4)
        assert results.run(aten.add.out, (first, 1), {"out": first}) is first
        for _ in range(2):
            assert results.run(aten.add.out, (first, 1), {"out": other}) is other


def test_a_failing_call_fails_each_time():
    results = FakeResults()
    with recorded_tensors():
        tensor = torch.empty(4, 4)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                results.run(aten.mm.default, (tensor, torch.empty(3, 3)), {})


def test_a_tensor_with_a_known_value_keeps_it():
    results = FakeResults()
    with recorded_tensors():
        for value in (2, 3):
            found = results.run(aten.mul.Tensor, (torch.tensor(value), 2), {})
            assert found.item() == 2 * value


def test_equal_numbers_of_other_types_are_other_arguments():
    results = FakeResults()
    with recorded_tensors():
        whole = torch.empty(4, dtype=torch.int64)
        found = [results.run(aten.add.Tensor, (whole, value), {}).dtype for value in (1, 1.0, 1, 1.0)]
    assert found == [torch.int64, torch.float32] * 2


def test_the_gradient_of_a_transposed_input_of_layer_norm_is_contiguous():
    """As torch's kernels make it. The fake one is transposed, so that no copy follows."""

    def strides(run):
        x, weight = torch.ones(2, 6, 4).transpose(1, 2), torch.ones(6)
        out, mean, scale = run(aten.native_layer_norm.default, (x, [6], weight, weight, 1e-5), {})
        given = (torch.ones(2, 4, 6), x, [6], mean, scale, weight, weight, [True, True, True])
        return out.stride(), run(aten.native_layer_norm_backward.default, given, {})[0].stride()

    results = FakeResults()
    expected = strides(lambda func, args, kwargs: func(*args, **kwargs))
    with recorded_tensors():
        assert strides(results.run) == strides(results.run) == expected
