"""Checkpoints in the formats of others: Hugging Face's and torch.distributed.checkpoint's."""

import json

import pytest
import torch
from torch import nn

import echelon
from echelon.checkpoint import Store
from echelon.checkpoint.hugging_face import export_hf
from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.cli import main
from echelon.pipeline import Pipeline
from tests.helpers.models import fill


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_OFFLINE", "1")
        yield


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    return GPT2LMHeadModel(config), ("transformer.h.1",)


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 11}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config), ("model.layers.1",)


def saved_by_a_pipeline(group, model, at, path):
    ids = torch.arange(8).view(2, 4)
    pipe = Pipeline(model, group, "gpipe", 2, at=at, example=(ids,), example_kwargs={"use_cache": False})
    Store(path).save(3, model=pipe, extra={"config": model.config.to_dict()})


def saved_by_one(group, model, _, path):
    Store(path).save(3, model=model, extra={"config": model.config.to_dict()})


@pytest.mark.parametrize(
    ("make", "save", "ranks"),
    [
        (make_gpt2, saved_by_one, 1),
        pytest.param(make_gpt2, saved_by_a_pipeline, 2, marks=pytest.mark.slow),
        pytest.param(make_llama, saved_by_a_pipeline, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(180)
def test_from_pretrained_loads_an_export(make, save, ranks, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model, at = make()
    model.eval()
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    echelon.simulate(save, ranks, (model, at, run))
    assert main(["checkpoint", "export", run, "--hf", out]) == 0
    assert capsys.readouterr().out.startswith("step 3: ")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    ids = torch.arange(8).view(2, 4)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_an_export_in_several_files(tmp_path):
    from transformers import AutoModelForCausalLM

    model, _ = make_llama()
    Store(tmp_path / "run").save(0, model=model)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    found = export_hf(open_checkpoint(tmp_path / "run"), str(tmp_path / "out"), str(tmp_path), shard=2000)
    assert len(found.files) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def make(value=None):
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    if value is not None:
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def trained():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def assert_same(model, optimizer, expected, its_optimizer):
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.state_dict().items())
    states = optimizer.state_dict()["state"]
    for number, state in its_optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states[number][key]) for key, value in state.items())
    assert optimizer.param_groups[0]["lr"] == its_optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_an_export(tmp_path):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = trained()
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    Store(run).save(3, model=model, optimizer=optimizer)
    assert main(["checkpoint", "export", run, "--dcp", out, "--step", "3"]) == 0
    other = make(0.5)
    its = torch.optim.AdamW(other.parameters())
    weights, state = get_state_dict(other, its)
    found = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    set_state_dict(other, its, model_state_dict=weights, optim_state_dict=state)
    assert found["step"] == 3
    assert_same(other, its, model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", ["optimizer", "optim", None])
def test_an_import_of_a_checkpoint_of_torch(key, tmp_path, capsys):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    run, saved = str(tmp_path / "run"), str(tmp_path / "saved")
    dcp.save({"model": weights, key: state} if key else weights, checkpoint_id=saved, no_dist=True)
    assert main(["checkpoint", "import", run, "--dcp", saved, "--step", "7"]) == 0
    assert "which can run any code: is it from a source you trust?" in capsys.readouterr().err
    assert main(["checkpoint", "import", run, "--dcp", saved]) == 2  # as step 0, which no load would take
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"echelon: step 0 is older than step 7 in {run}, which the next load() would choose: remove the newer ones "
        f"with `echelon checkpoint remove {run} 7`, or save into another folder"
    )
    other = make(0.5)
    its = torch.optim.AdamW(other.parameters())
    if key is None:
        assert Store(run).load(model=other) == 7
        its = optimizer
    else:
        assert Store(run).load(model=other, optimizer=its) == 7
    assert_same(other, its, model, optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "{run}"], "give one of --hf DIR and --dcp DIR"),
        (["export", "{run}", "--hf", "{new}", "--dcp", "{new}"], "give one of --hf DIR and --dcp DIR"),
        (["export", "{run}", "--dcp", "{new}", "--config", "x"], "--config is for --hf: leave it out"),
        (
            ["export", "{run}", "--hf", "{new}"],
            "there is no config of the model: give --config FILE, or save it: extra={{'config': model.config.to_dict()",
        ),
        (["export", "{run}", "--dcp", "{run}"], "cannot write {run}: it has files already; give a new folder"),
        (["export", "{new}", "--dcp", "{new}"], "cannot read {new}: there is no such folder; give the one in which"),
        (["import", "{new}", "--dcp", "{run}"], "cannot read {run}: it has no .metadata; give a folder that torch.dis"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    names = {"run": str(tmp_path / "run"), "new": str(tmp_path / "new")}
    Store(names["run"]).save(0, model=make())
    assert main(["checkpoint", *(each.format(**names) for each in arguments)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"echelon: {message.format(**names)}")
