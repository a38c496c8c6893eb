"""Models of Hugging Face have the FLOPs of a real step, however their layers choose, loop and leave out."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from echelon import foresee
from echelon.foresight.trace import Kernel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"), 64
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "vocab_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **{"num_key_value_heads": 2, "image_size": 32, "patch_size": 8, "head_dim": 16, "d_kv": 16, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
"""Values in place of a model's own, where its configuration has them."""
MODELS = (
    *("albert", "bart", "bert", "big_bird", "bloom", "canine", "convbert", "ctrl", "deberta-v2", "electra", "fnet"),
    *("gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granitemoe", "ibert", "llama", "longt5", "m2m_100", "mamba"),
    *("mixtral", "mobilebert", "modernbert", "opt", "t5", "xlm"),
    *("bit", "clip_vision_model", "dinov3_convnext", "focalnet", "mobilenet_v2", "vit"),
    *("data2vec-audio", "hubert", "wav2vec2", "whisper"),
)


def configuration(name):
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING[name]()
    return CONFIG_MAPPING[name](
        **{key: value for key, value in SIZES.items() if type(getattr(usual, key, None)) is int}
    )


def inputs(model, config, device):
    name = model.main_input_name
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        return {name: torch.ones(2, config.num_channels, size, size, device=device)}
    if name == "input_values":
        return {name: torch.ones(2, 8000, device=device)}
    words = torch.ones(2, 16, dtype=torch.int64, device=device)
    decoded = {"decoder_input_ids": words[:, :8]} if config.is_encoder_decoder else {}
    if name == "input_features":
        return {name: torch.ones(2, config.num_mel_bins, 2 * config.max_source_positions, device=device), **decoded}
    return {name: words, **decoded}


def train(name, device):
    from transformers import AutoModel

    torch.manual_seed(0)
    config = configuration(name)
    model = AutoModel.from_config(config, attn_implementation="eager").to(device).train()
    outputs = model(**inputs(model, config, device)).to_tuple()
    next(each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad).float().sum().backward()


def of_convolution(gradient, x, weight, *others, out_val):
    """torch's own formula counts the groups of a weight's gradient twice."""
    forward = conv_flop_count(x.shape, weight.shape, gradient.shape, transposed=others[4])
    return forward * sum(each is not None for each in out_val[:2])


def of_experts(rows, weights, *_, **__):
    """Each row has one expert, or each expert's matrix is a product over its rows."""
    return 2 * rows.shape[0] * rows.shape[1] * weights.shape[-1 if weights.ndim == 3 else 1]


of_convolution._get_raw = of_experts._get_raw = True  # the counter gives them tensors, not shapes
FORMULAS = {torch.ops.aten.convolution_backward: of_convolution, torch.ops.aten._grouped_mm: of_experts}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_flops_of_a_real_step(name):
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        train(name, "cpu")
    seen = foresee(train, 1, (name, "cuda"), gpu="h100")
    flops = sum(entry.flops for entry in seen.traces[0].entries if isinstance(entry, Kernel))
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
