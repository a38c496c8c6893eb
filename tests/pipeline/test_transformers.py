"""Models of Hugging Face, from small configurations, are cut without being edited."""

import pytest
import torch
from torch.nn import functional

import echelon
from echelon.pipeline import Pipeline, split

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[dev]' brings it"
)

VOCABULARY = 61
NUM_BLOCKS = 3


def small(model_class, config_class, **options):
    torch.manual_seed(0)
    return model_class(config_class(vocab_size=VOCABULARY, **options)).double()


def gpt2(attention="sdpa", dropout=0.1, is_tied=False):
    return small(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        n_positions=32,
        n_embd=16,
        n_layer=NUM_BLOCKS,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=is_tied,
        attn_implementation=attention,
    )


def llama(attention="sdpa", dropout=0.0):
    return small(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=dropout,
        attn_implementation=attention,
    )


def ids_of(num_samples, length):
    return torch.randint(VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(1))


def run_parts(parts, ids):
    value = (ids,)
    for part in parts.modules:
        value = part(*value)
    return value


@pytest.fixture(autouse=True)
def one_thread():
    """Computes as simulated ranks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "at"), [(gpt2, ["h.1", "h.2"]), pytest.param(llama, ["layers.1", "layers.2"], marks=pytest.mark.slow)]
)
def test_parts_equal_the_model_bit_for_bit_in_any_shape(make, at):
    """With the eager attention; transformers takes another path through torch's own when it is traced (see below)."""
    model = make("eager")
    parts = split(model, at=at, example=(ids_of(2, 8),))
    for mode in (True, False):
        model.train(mode)
        for part in parts.modules:
            part.train(mode)
        for shape in ((2, 8), (1, 1), (5, 32)):
            gradients = []
            for compute in (model, lambda ids: run_parts(parts, ids)):
                torch.manual_seed(3)
                output = compute(ids_of(*shape))
                gradients.append({"logits": output.logits})
                if mode:
                    model.zero_grad()
                    output.logits.square().sum().backward()
                    gradients[-1] |= {name: p.grad for name, p in model.named_parameters()}
            for name, wanted in gradients[0].items():
                assert torch.equal(gradients[1][name], wanted), name


def loss_of(output, target):
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def train(group, make, at):
    pipe = Pipeline(make(dropout=0.0), group, "1f1b", 2, loss_of, at=at, example=(ids_of(2, 8),))
    losses = [pipe.step(ids_of(n, length), target=ids_of(n, length)).loss for n, length in ((2, 5), (5, 9))]
    scores = pipe.eval().forward(ids_of(1, 4))
    return losses, {name: p.grad for name, p in pipe.named_parameters()}, scores


@pytest.mark.parametrize(
    ("make", "at"),
    [
        pytest.param(llama, None, marks=pytest.mark.slow),
        pytest.param(gpt2, ["h.2"], marks=pytest.mark.slow),  # each rank traces the model, which takes seconds
        pytest.param(gpt2, None, marks=pytest.mark.slow),
        pytest.param(llama, ["layers.2"], marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_trains_it(make, at):
    """Outputs are equal; gradients within rounding: traced, transformers' attention has a mask and not a flag."""
    results = echelon.simulate(train, 2, (make, at), timeout=20.0, late_sends=True).results
    model = make(dropout=0.0)
    for step, (num_samples, length) in enumerate(((2, 5), (5, 9))):
        total = 0
        for ids in ids_of(num_samples, length).tensor_split(2):
            loss = loss_of(model(ids), ids) * (len(ids) / num_samples)
            loss.backward()
            total += loss.detach()
        assert all(torch.equal(result[0][step], total) for result in results)
    gradients = results[0][1] | results[1][1]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(results[1][2].logits, model.eval()(ids_of(1, 4)).logits)


def mask_of(num_samples, length):
    """Each sample has another length."""
    return (torch.arange(length) < length - torch.arange(num_samples)[:, None] % 3).long()


def train_tied(group, schedule):
    example = {"example": (ids_of(2, 8),), "example_kwargs": {"attention_mask": mask_of(2, 8)}}
    pipe = Pipeline(gpt2("eager", 0.0, is_tied=True), group, schedule, 2, loss_of, at=["h.2"], **example)
    shapes = ((2, 5), (5, 9))
    losses = [pipe.step(ids_of(*s), target=ids_of(*s), attention_mask=mask_of(*s)).loss for s in shapes]
    return losses, {name: p.grad for name, p in pipe.named_parameters()}, set(pipe.state_dict())


@pytest.mark.slow
def test_processes_train_it_with_a_tied_head_and_a_mask_for_each_sample(pool):
    results = pool.run(train_tied, 2, "zb-h1", timeout=100.0)  # each rank traces the model
    model = gpt2("eager", 0.0, is_tied=True)
    for step, (num_samples, length) in enumerate(((2, 5), (5, 9))):
        total = 0
        batch = (ids_of(num_samples, length), mask_of(num_samples, length))
        for ids, mask in zip(*(tensor.tensor_split(2) for tensor in batch), strict=True):
            loss = loss_of(model(ids, attention_mask=mask), ids) * (len(ids) / num_samples)
            loss.backward()
            total += loss.detach()
        assert all(torch.equal(losses[step], total) for losses, *_ in results)
    (_, first, _), (_, last, _) = results
    assert torch.equal(first["transformer.wte.weight"], last["lm_head.weight"])
    for name, gradient in (first | last).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-11, atol=1e-13)
    assert results[0][2] | results[1][2] == set(model.state_dict())
