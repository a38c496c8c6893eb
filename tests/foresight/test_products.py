"""Floating-point operations of products, and the precision in which a GPU computes those of float32."""

import math
import unittest.mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from echelon import foresee
from echelon.foresight.trace import UNKNOWN_STORAGE, Kernel
from tests.helpers.grids import covering

CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul


def kernels(seen):
    return [each for each in seen.traces[0].entries if isinstance(each, Kernel)]


def one_of_each():
    x = torch.randn(1, 2, 64, 64, device="cuda", requires_grad=True)
    nn.Conv2d(2, 2, 3, device="cuda")(x).sum().backward()
    return torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")


@pytest.mark.parametrize(
    ("setting", "product", "convolution"),
    [
        (lambda: None, "float32", "tf32"),
        (lambda: torch.set_float32_matmul_precision("high"), "tf32", "tf32"),
        (lambda: torch.set_float32_matmul_precision("medium"), "tf32", "tf32"),
        (lambda: setattr(MATMUL, "allow_tf32", True), "tf32", "tf32"),
        (lambda: setattr(CUDNN, "allow_tf32", False), "float32", "float32"),
        (lambda: setattr(MATMUL, "fp32_precision", "tf32"), "tf32", "tf32"),
        (lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"), "float32", "float32"),
    ],
)
def test_float32_is_computed_as_the_program_allows(setting, product, convolution):
    def program():
        setting()
        one_of_each()

    before = CUDNN.allow_tf32, torch.get_float32_matmul_precision(), MATMUL.fp32_precision
    dtypes = {each.name: each.dtype for each in kernels(foresee(program, 1, gpu="a100")) if each.kind == "matmul"}
    assert dtypes == {"mm": product, "convolution": convolution, "convolution_backward": convolution}
    assert (CUDNN.allow_tf32, torch.get_float32_matmul_precision(), MATMUL.fp32_precision) == before


def test_processors_know_no_tf32():
    def program():
        torch.set_float32_matmul_precision("high")
        torch.ones(9, 9) @ torch.ones(9, 9)

    seen = foresee(program, 1, gpu="cpu")
    assert [each.dtype for each in kernels(seen) if each.name == "mm"] == ["float32"]


@pytest.mark.parametrize(("real", "complex_"), [(torch.float32, torch.complex64), (torch.float64, torch.complex128)])
def test_a_product_of_complex_numbers_is_four_of_real_ones(real, complex_):
    def program(dtype):
        torch.empty(4096, 4096, device="cuda", dtype=dtype) @ torch.empty(4096, 4096, device="cuda", dtype=dtype)

    seen = [foresee(program, 1, (each,), gpu="a100") for each in (real, complex_)]
    assert seen[1].step_seconds / seen[0].step_seconds == pytest.approx(4, rel=0.01)
    assert seen[1].mfu == pytest.approx(seen[0].mfu, rel=0.01)


def test_a_large_product_is_as_fast_as_the_data_sheet_says():
    def program(precision):
        torch.set_float32_matmul_precision(precision)
        torch.empty(8192, 8192, device="cuda") @ torch.empty(8192, 8192, device="cuda")

    plain, tf32 = (foresee(program, 1, (each,), gpu="a100").step_seconds for each in ("highest", "high"))
    assert plain / tf32 == pytest.approx(156 / 19.5, rel=0.02)


@pytest.mark.parametrize(
    ("program", "flops"),
    [
        (lambda x: torch.addbmm(x(4, 6), x(3, 4, 5), x(3, 5, 6)), 2 * 3 * 4 * 5 * 6),
        (lambda x: torch._int_mm(x(32, 16).char(), x(16, 8).char()), 2 * 32 * 16 * 8),
        (lambda x: torch._weight_int8pack_mm(x(3, 32), x(16, 32).char(), x(16)), 2 * 3 * 32 * 16),
        (lambda x: torch._weight_int4pack_mm(x(3, 64), x(8, 1, 32, 4).int(), 64, x(1, 64, 2)), 2 * 3 * 64 * 64),
        (
            lambda x: F.scaled_mm(
                x(32, 64).to(torch.float8_e4m3fn),
                x(16, 64).to(torch.float8_e4m3fn).t(),
                x(),
                F.ScalingType.TensorWise,
                x(),
                F.ScalingType.TensorWise,
            ),
            2 * 32 * 64 * 16,
        ),
        (
            lambda x: torch._scaled_grouped_mm(
                x(32, 64).to(torch.float8_e4m3fn),
                x(2, 16, 64).to(torch.float8_e4m3fn).transpose(1, 2),
                x(32),
                x(2, 16),
                torch.tensor([16, 32], device="cuda", dtype=torch.int32),
                out_dtype=torch.bfloat16,
            ),
            2 * 32 * 64 * 16,
        ),
        (lambda x: torch.cdist(x(2, 30, 8), x(2, 40, 8)), 2 * 2 * 30 * 40 * 8),
        (lambda x: torch.cdist(x(2, 30, 8), x(2, 40, 8), p=1), 2 * 2 * 30 * 40 * 8),
        (lambda x: F.bilinear(x(7, 3), x(7, 4), x(5, 3, 4)), 2 * 7 * 3 * 4 * 5),
    ],
    ids=[
        "addbmm",
        "int_mm",
        "int8 weights",
        "int4 weights",
        "scaled_mm",
        "scaled_grouped_mm",
        "cdist",
        "cdist by sums",
        "bilinear",
    ],
)
def test_products_without_a_formula_of_torch_have_flops(program, flops):
    seen = foresee(lambda: program(lambda *shape: torch.empty(shape, device="cuda")), 1, gpu="h100")
    assert [each.flops for each in kernels(seen) if each.kind == "matmul"] == [flops]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (torch.linalg.eigh, "linalg_eigh"),
        (torch.linalg.inv, "linalg_inv_ex"),
        (torch.linalg.qr, "linalg_qr"),
        (torch.linalg.vector_norm, ""),
        (lambda x: x @ x, ""),
    ],
)
def test_kernels_that_take_longer_than_their_bytes_are_named(program, name):
    seen = foresee(lambda: program(torch.empty(8, 8, device="cuda")), 1, gpu="h100")
    text = f"{name} takes the time of its bytes alone, which is too short at "
    assert [each.startswith(text) for each in seen.assumptions if "bytes" in each] == [True] * bool(name)


def test_operators_of_the_program_are_named_unless_their_flops_are_registered():
    @torch.library.custom_op("foreseen::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @torch.library.custom_op("foreseen::squared", mutates_args=())
    def squared(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    def program():
        return squared(doubled(torch.empty(64, 64, device="cuda")))

    for each in (doubled, squared):
        each.register_fake(torch.empty_like)
    seen = foresee(program, 1, gpu="h100")
    assert sum("bytes" in each for each in seen.assumptions) == 2
    # Not by the decorator, which keeps the formula for later tests.
    formula = {torch.ops.foreseen.squared: lambda x, **_: 2 * x.shape[0] ** 3}
    with unittest.mock.patch.dict(flop_registry, formula):
        seen = foresee(program, 1, gpu="h100")
    (found,) = (each for each in seen.assumptions if "bytes" in each)
    assert found.startswith("foreseen::doubled takes the time of its bytes alone")
    assert [each.flops for each in kernels(seen) if each.name in ("doubled", "squared")] == [0, 2 * 64**3]


# Connectionist temporal classification


def ctc(targets, lengths, device="cpu", shape=(20, 3, 7), **options):
    scores = torch.randn(shape, device=device, requires_grad=True)
    steps = (20, 20, 20) if isinstance(lengths, tuple) else torch.full_like(lengths, 20)
    loss = F.ctc_loss(scores.log_softmax(-1), targets, steps, lengths, **options)
    loss.sum().backward()
    return loss.shape, scores.grad.shape


TARGETS = {
    "padded": (lambda: torch.ones(3, 6, dtype=torch.int64), lambda: torch.tensor([2, 5, 3]), (20, 3, 7), 5),
    "tuple": (lambda: torch.ones(3, 6, dtype=torch.int64), lambda: (2, 5, 3), (20, 3, 7), 5),
    "joined": (lambda: torch.ones(10, dtype=torch.int64), lambda: torch.tensor([2, 5, 3]), (20, 3, 7), 5),
    "one sample": (lambda: torch.ones(4, dtype=torch.int64), lambda: torch.tensor(4), (20, 7), 4),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    covering(TARGETS, [{}, {"reduction": "none"}, {"reduction": "sum", "zero_infinity": True}]),
    ids=str,
)
def test_a_ctc_loss_has_the_shapes_and_the_memory_of_torch(kind, options):
    targets, lengths, shape, longest = TARGETS[kind]

    def program():
        shapes.append(ctc(targets().cuda(), lengths(), "cuda", shape, **options))

    shapes = []
    seen = foresee(program, 1, gpu="h100")
    foresee(lambda: shapes.append(ctc(targets(), lengths(), shape=shape, **options)), 1, gpu="cpu")
    assert shapes == [ctc(targets(), lengths(), shape=shape, **options)] * 2
    (loss,) = (each for each in kernels(seen) if each.name == "_ctc_loss")
    batch = 3 if len(shape) == 3 else 1
    assert sum(size for _, size in loss.writes) == 4 * batch * (1 + 20 * (2 * longest + 1))


def test_targets_of_a_ctc_loss_lie_on_the_gpu_unless_cudnn_takes_them():
    joined = torch.ones(10, dtype=torch.int32)
    assert foresee(lambda: ctc(torch.ones_like(joined), (2, 5, 3), "cuda"), 1, gpu="h100").step_seconds > 0

    def program(dtype):
        with torch.no_grad():
            scores = torch.randn(20, 3, 7, device="cuda").log_softmax(-1)
            F.ctc_loss(scores, torch.ones(3, 6, dtype=dtype), (20, 20, 20), (2, 5, 3))

    for dtype in (torch.int64, torch.int32):
        with pytest.raises(RuntimeError, match=r"ctc_loss takes a tensor of the CPU, made at .*test_products.py"):
            foresee(program, 1, (dtype,), gpu="h100")


def test_a_ctc_loss_of_torch_itself_is_one_number_for_each_sample():
    """As it is without an argument for the reduction."""

    def loss(device):
        scores = torch.zeros(20, 3, 7, device=device)
        return torch.ctc_loss(scores, torch.ones(3, 6, dtype=torch.int64, device=device), (20, 20, 20), (2, 5, 3))

    shapes = []
    foresee(lambda: shapes.append(loss("cuda").shape), 1, gpu="h100")
    assert shapes == [loss("cpu").shape]


def test_unknown_lengths_of_a_ctc_loss_are_equal():
    def program():
        mask = torch.randn(3, 6, device="cuda") > 0
        ctc(torch.ones(3, 6, dtype=torch.int64, device="cuda"), mask.sum(-1), "cuda")

    seen = foresee(program, 1, gpu="h100")
    assert [each.partition(" at ")[0] for each in seen.assumptions if "ctc_loss" in each] == [
        "targets of ctc_loss are equally long",
        "ctc_loss takes the time of its bytes alone, which is too short",
        "ctc_loss_backward takes the time of its bytes alone, which is too short",
    ]


# Convolutions


CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(8, 16, 3, padding=1), (2, 8, 12, 12)),
    "stride": (lambda: nn.Conv2d(8, 16, 2, stride=2, bias=False), (2, 8, 12, 12)),
    "groups": (lambda: nn.Conv2d(32, 64, 3, groups=2), (2, 32, 12, 12)),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, groups=32), (2, 32, 12, 12)),
    "dilation": (lambda: nn.Conv1d(8, 16, 3, dilation=2), (2, 8, 40)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 3), (2, 8, 12, 12)),
    "transposed groups": (lambda: nn.ConvTranspose3d(32, 64, 2, stride=2, groups=2), (2, 32, 4, 4, 4)),
}


def convolved(make, shape, device, *, layout=torch.contiguous_format, dtype=torch.float32, compiled=False):
    layer = make().to(device, dtype, memory_format=layout)
    run = torch.compile(layer) if compiled else layer
    x = torch.empty(shape, device=device, dtype=dtype).to(memory_format=layout).requires_grad_()
    run(x).backward(torch.empty_like(run(x)))


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS.values(), ids=list(CONVOLUTIONS))
def test_a_convolution_is_a_product_for_each_result(make, shape):
    with FlopCounterMode(display=False) as counter:
        make()(torch.zeros(shape))
    products = [
        each for each in kernels(foresee(convolved, 1, (make, shape, "cuda"), gpu="h100")) if each.kind == "matmul"
    ]
    products = products[1:]  # one more forward, for the shape of the gradient
    assert [each.name for each in products] == ["convolution", "convolution_backward", "convolution_backward"]
    on_processor = kernels(foresee(convolved, 1, (make, shape, "cpu"), gpu="cpu"))
    assert [each.flops for each in on_processor if each.kind == "matmul"][1:] == [
        products[0].flops,
        2 * products[0].flops,
    ]
    for each in products:
        assert each.flops == counter.get_total_flops()
        # A window that sticks out is cut off in one of the shapes, and rounded.
        assert not each.shape or 2 * math.prod(each.shape) == pytest.approx(each.flops, rel=0.35)


@pytest.mark.parametrize(
    ("name", "options", "converted"),
    [
        ("plain", {}, 3 * 2),
        ("plain", {"layout": torch.channels_last}, 0),
        ("plain", {"dtype": torch.float16}, 3 * 2),
        ("plain", {"dtype": torch.float64}, 0),  # no tensor cores
        ("plain", {"compiled": True}, 0),
        ("groups", {}, 3 * 2),
        ("depthwise", {}, 0),
    ],
    ids=str,
)
def test_images_with_channels_first_are_converted(name, options, converted):
    """The input and the output of each product."""

    def program():
        convolved(*CONVOLUTIONS[name], "cuda", **options)

    found = kernels(foresee(program, 1, gpu="h100"))
    conversions = [each for each in found if each.name == "to_channels_last"]
    assert len(conversions) == converted + (2 if converted else 0)  # and one more forward
    image = next(each for each in found if each.kind == "matmul").reads[0]
    assert not converted or (conversions[0].reads, conversions[0].writes) == ((image,), ((UNKNOWN_STORAGE, image[1]),))


def test_an_expanded_gradient_of_images_is_made_whole():
    def program():
        x = torch.ones(4, 8, 16, 16, device="cuda", requires_grad=True)
        nn.Conv2d(8, 8, 3, padding=1, device="cuda")(x).sum().backward()

    found = kernels(foresee(program, 1, gpu="h100"))
    whole, one = 4 * 8 * 16 * 16 * 4, 4
    first = next(index for index, each in enumerate(found) if each.phase == "backward" and each.kind == "matmul") - 2
    # Read from its one element, then written and read as a whole.
    assert found[first].num_bytes == one + whole
    assert [each.reads[0][1] for each in found[first:] if each.name == "convolution_backward"] == [whole] * 3


def test_a_gradient_that_is_not_needed_has_no_kernel():
    def program():
        convolution = nn.Conv2d(8, 16, 3, device="cuda", dtype=torch.float64)
        convolution.bias.requires_grad_(False)
        convolution(torch.empty(2, 8, 12, 12, device="cuda", dtype=torch.float64)).sum().backward()

    seen = foresee(program, 1, gpu="h100")
    assert [each.kind for each in kernels(seen) if each.name == "convolution_backward"] == ["matmul"]


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        (lambda x: x.addmm_(x, x), (1, 64, 64, 64)),
        (lambda x: x[None].baddbmm_(x[None], x[None]), (1, 64, 64, 64)),
        (lambda x: x.addbmm_(x.expand(3, 64, 64), x.expand(3, 64, 64)), (1, 64, 64, 3 * 64)),
    ],
)
def test_a_product_that_is_added_in_place_has_flops(product, shape):
    seen = foresee(lambda: product(torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)), 1)
    (found,) = (each for each in kernels(seen) if each.kind == "matmul")
    assert (found.dtype, found.flops, found.shape) == ("bfloat16", 2 * math.prod(shape), shape)


# Attention


def varlen(tokens, documents, *, gpu, **options):
    """Attention inside of documents of equal length, one after another."""
    query, key, value = (
        torch.empty(tokens, 4, 32, device=gpu, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    ends = torch.arange(documents + 1, dtype=torch.int32, device=gpu) * (tokens // documents)
    longest = tokens // documents
    varlen_attn(query, key, value, ends, ends, longest, longest, **options).sum().backward()


@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, *({"window_size": size} for size in ((-1, 0), (16, 0), (16, 16), (32, 4), (0, 200)))],
    ids=str,
)
def test_attention_to_documents_counts_the_keys_that_a_query_sees(documents, options):
    tokens = 256
    seen = foresee(lambda: varlen(tokens, documents, gpu="cuda", **options), 1, gpu="h100")
    forward, backward = (each for each in kernels(seen) if "varlen" in each.name)
    length = tokens // documents
    before, after = (length if each < 0 else each for each in options.get("window_size", (-1, -1)))
    # A query is in the middle of its own key.
    seen_keys = sum(min(each + 0.5, before) + min(length - each - 0.5, after) for each in range(length)) / length
    assert forward.kind == backward.kind == "attention"
    assert forward.flops == 2 * 2 * 4 * 32 * tokens * seen_keys
    assert backward.flops == forward.flops * 5 // 2
    assert forward.shape == (documents, 4, tokens // documents, tokens // documents, 32)


@pytest.mark.parametrize(
    ("queries", "keys", "seen_keys", "shape"),
    [(1, 512, 511.5, (2, 4, 1, 512, 32)), (64, 512, 480, (2, 4, 64, 512, 32)), (512, 64, 32, (2, 4, 512, 64, 32))],
)
def test_the_last_query_of_a_document_is_at_its_last_key(queries, keys, seen_keys, shape):
    """As in decoding, and in a prompt that is computed in parts."""

    def program():
        query, key = (torch.empty(2 * length, 4, 32, device="cuda", dtype=torch.bfloat16) for length in (queries, keys))
        ends = [torch.tensor([0, each, 2 * each], dtype=torch.int32, device="cuda") for each in (queries, keys)]
        varlen_attn(query, key, key, *ends, queries, keys, window_size=(-1, 0))

    (kernel,) = (each for each in kernels(foresee(program, 1, gpu="h100")) if "varlen" in each.name)
    assert kernel.flops == 2 * 2 * 4 * 32 * 2 * queries * seen_keys
    assert kernel.shape == shape


@pytest.mark.parametrize("are_known", [True, False])
def test_documents_of_other_lengths_count_by_their_lengths(are_known):
    lengths = [100, 300, 600]

    def program():
        query = torch.empty(1000, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        if not are_known:
            ends = (torch.empty(4, device="cuda") * ends).to(torch.int32)
        varlen_attn(query, query, query, ends, ends, 600, 600, window_size=(-1, 0)).sum().backward()

    seen = foresee(program, 1, gpu="h100")
    forward, backward = (each for each in kernels(seen) if "varlen" in each.name)
    pairs = sum(each * each for each in lengths) if are_known else 1000 * 600
    assert forward.flops == 2 * 2 * 4 * 32 * pairs / 2
    assert backward.flops == forward.flops * 5 // 2
    # The length in which most of the work is done decides on the speed.
    assert forward.shape[3] == (round(sum(each**3 for each in lengths) / pairs) if are_known else 600)
    text = "each sequence of attention is as long as the longest at "
    assert sum(each.startswith(text) for each in seen.assumptions) == (not are_known)


def inner_attention(name, lengths, heads, ends, **options):
    """Calls one of torch's own operators below attention, as libraries do, whose heads come after the positions."""
    query, key = (
        torch.empty(*length, of_heads, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for length, of_heads in zip(lengths, heads, strict=True)
    )
    if ends:
        ends = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in ends]
        longest = [int(each.diff().max()) for each in ends]
    else:
        ends, longest = [None, None], [length[-1] for length in lengths]
    if name == "_flash_attention_forward":
        given = (*ends, *longest, 0.0, options.get("is_causal", False), False)
    else:
        given = (None, *ends, *longest, 0.0, int(options.get("is_causal", False)), True)
    getattr(torch.ops.aten, name)(query, key, key, *given)[0].sum().backward()


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_efficient_attention_forward"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_may_come_after_the_positions(name, is_causal):
    def program():
        inner_attention(name, [(2, 64), (2, 64)], (4, 4), None, is_causal=is_causal)

    forward, backward = (each for each in kernels(foresee(program, 1)) if "attention" in each.name)
    assert forward.kind == backward.kind == "attention"
    assert forward.shape == backward.shape == (2, 4, 64, 64, 32)
    assert forward.flops == 2 * 2 * 2 * 4 * 64 * 64 * 32 // (2 if is_causal else 1)
    assert backward.flops == forward.flops * 5 // 2


@pytest.mark.parametrize(
    ("name", "before"), [("_flash_attention_forward", ()), ("_efficient_attention_forward", (1,))], ids=["flash", "eff"]
)
def test_documents_may_lie_one_after_another_there(name, before):
    def program():
        inner_attention(name, [(*before, 96), (*before, 192)], (4, 4), ([0, 32, 64, 96], [0, 64, 128, 192]))

    forward, backward = (each for each in kernels(foresee(program, 1)) if "attention" in each.name)
    assert forward.shape == backward.shape == (3, 4, 32, 64, 32)
    assert forward.flops == 2 * 2 * 3 * 4 * 32 * 64 * 32


def test_queries_that_share_a_key_are_taken_together():
    def program():
        query, key = (
            torch.empty(2, heads, length, 64, device="cuda", dtype=torch.bfloat16)
            for heads, length in ((8, 1), (2, 512))
        )
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    (kernel,) = (each for each in kernels(foresee(program, 1, gpu="h100")) if each.kind == "attention")
    assert kernel.shape == (2, 2, 4, 512, 64)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, _: torch.mm(x, x, out_dtype=torch.float32),
        lambda x, _: torch.bmm(x[None], x[None], out_dtype=torch.float32),
        lambda x, total: torch.addmm(total, x, x, out_dtype=torch.float32),
        lambda x, total: torch.addmm(total, x, x, out_dtype=torch.float32, out=total),
        lambda x, total: torch.baddbmm(total[None], x[None], x[None], out_dtype=torch.float32),
    ],
)
def test_a_product_that_is_written_or_added_in_float32_has_the_speed_of_its_factors(product):
    def program():
        x = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
        assert product(x, torch.empty(4096, 4096, device="cuda")).dtype == torch.float32

    (found,) = [each for each in kernels(foresee(program, 1, gpu="h100")) if each.kind == "matmul"]
    assert (found.dtype, found.flops, found.shape) == ("bfloat16", 2 * 4096**3, (1, 4096, 4096, 4096))


def of_vectors(name):
    matrix, rows, columns = (torch.randn(*each, device="cuda", requires_grad=True) for each in ((30, 40), (30,), (40,)))
    with torch.no_grad():
        kept = rows * 1
        kept.addmv_(matrix, columns)
    match name:
        case "mv":
            matrix.mv(columns).sum().backward()
        case "addmv":
            torch.addmv(rows, matrix, columns).sum().backward()
        case "addr":
            torch.addr(matrix, rows, columns).sum().backward()
        case "dot":
            torch.dot(columns, columns.detach()).backward()


@pytest.mark.parametrize(("name", "flops"), [("mv", [1200, 1200]), ("addmv", [1200, 1200]), ("dot", [40])])
def test_products_with_vectors_have_flops(name, flops):
    found = [each for each in kernels(foresee(of_vectors, 1, (name,), gpu="h100")) if each.flops]
    assert [(each.name, each.flops) for each in found[:2]] == [("addmv_", 2400), (name, 2 * flops[0])]
    # The gradient of a matrix or vector that multiplies a vector is elementwise.
    assert [each.flops for each in found[2:]] == [2 * each for each in flops[1:]]
    assert all(each.kind == "matmul" and not each.shape for each in found)


def test_the_product_of_two_vectors_that_is_added_has_flops():
    found = [each for each in kernels(foresee(of_vectors, 1, ("addr",), gpu="h100")) if each.flops]
    assert [(each.name, each.flops) for each in found] == [("addmv_", 2400), ("addr", 2400), ("mv", 2400), ("mv", 2400)]


def test_a_product_with_a_vector_takes_the_time_of_its_bytes():
    def program(multiplies):
        matrix, vector = (torch.empty(*each, device="cuda") for each in ((8192, 8192), (8192,)))
        matrix @ vector if multiplies else matrix.sum(1)

    product, reading = (foresee(program, 1, (each,), gpu="h100").step_seconds for each in (True, False))
    assert product == pytest.approx(reading, rel=0.05)


def distances(power):
    rows, columns = (torch.randn(each, 8, device="cuda", requires_grad=True) for each in (30, 40))
    torch.cdist(rows, columns, p=power).sum().backward()


def test_gradients_of_distances_take_as_many_operations_as_distances():
    found = {each.name: each.flops for each in kernels(foresee(distances, 1, (1.0,), gpu="h100")) if each.flops}
    assert found == {"_cdist_forward": 2 * 30 * 40 * 8, "_cdist_backward": 2 * 30 * 40 * 8}
