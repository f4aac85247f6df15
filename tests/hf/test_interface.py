"""Models that do not use the attention interface, hybrids, unknown arguments, and loading without code."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf

import regard
from support.models import DECODER, MODELS, TEXT, build, inputs_of, logits

hf.logging.set_verbosity_error()
regard.hf.register()


def test_unknown_arguments_raise():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match="block_indices"):
        regard.hf.as_call(None, torch.nn.Module(), q, q, q, None, block_indices=torch.zeros(1), position_ids=None)
    with pytest.raises(ValueError, match="output_attentions"):
        regard.hf.as_call(None, torch.nn.Module(), q, q, q, None, output_attentions=True)
    regard.hf.as_call(None, torch.nn.Module(), q, q, q, None, future=None, output_attentions=False, use_cache=True)


def test_models_that_bypass_the_interface_raise():
    sizes = {"vocab_size": 64, "hidden_size": 32}
    neo = hf.GPTNeoConfig(**sizes, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4)
    bloom = hf.BloomConfig(**sizes, n_layer=2, n_head=4)
    for model in (hf.GPTNeoForCausalLM(neo), hf.BloomForCausalLM(bloom)):
        with pytest.raises(ValueError, match="bypasses"):
            regard.hf.check(model)
        model.set_attn_implementation("regard")  # transformers warns, and changes nothing
        assert model.config._attn_implementation != "regard"
        with pytest.raises(ValueError, match="bypass"):
            type(model)._from_config(model.config, attn_implementation="regard")
        model.config._attn_implementation = "regard"  # set without any check
        with pytest.raises(ValueError, match="bypass"):
            model(torch.zeros(1, 4, dtype=torch.long))
    # a model that requests no mask raises when it is built
    deberta = hf.DebertaV2Config(**sizes, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    with pytest.raises(ValueError, match="deberta_v2 models bypass"):
        hf.AutoModel.from_config(deberta, attn_implementation="regard")
    assert hf.AutoModel.from_config(deberta, attn_implementation="eager")


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
WITHOUT = {
    "mamba": lambda: hf.MambaConfig(**SMALL, state_size=4),
    "mamba2": lambda: hf.Mamba2Config(**SMALL, state_size=4, num_heads=4, head_dim=16, n_groups=1),
    "falcon_mamba": lambda: hf.FalconMambaConfig(**SMALL, state_size=4),
    "xlstm": lambda: hf.xLSTMConfig(vocab_size=64, hidden_size=32, num_heads=2, num_blocks=1),
    "resnet": lambda: hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]),
    "bamba, all layers Mamba": lambda: bamba([]),
}


def bamba(attentions):
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    return hf.BambaConfig(**DECODER, **sizes, attn_layer_indices=attentions)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_attention_raises(name):
    with pytest.raises(ValueError, match=r"attn_implementation: .*Model, which has no attention"):
        hf.AutoModel.from_config(WITHOUT[name](), attn_implementation="regard")
    model = hf.AutoModel.from_config(WITHOUT[name]())
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"attn_implementation: .*Model, which has no attention"):
        model.set_attn_implementation("regard")
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match=r"model: .*Model, which has no attention"):
        regard.hf.check(model)


def jamba():
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "experts_implementation": "eager"}
    return hf.JambaConfig(**DECODER, **layers, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)


def zamba2():
    mamba = {"n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8, "mamba_ngroups": 1}
    layers = {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}
    return hf.Zamba2Config(**TEXT | {"hidden_size": 32}, **mamba, **layers)


HYBRIDS = {
    "bamba": lambda: bamba([1]),
    "jamba": jamba,
    "zamba2": zamba2,
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        **DECODER | {"num_hidden_layers": 3}, lru_width=32, attention_window_size=8
    ),
    "lfm2": lambda: hf.Lfm2Config(**DECODER, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_keeps_working(name, calls):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(HYBRIDS[name](), attn_implementation="regard").eval()
    given = inputs_of(name)
    got = logits(model, "regard", given)
    assert len(calls) == 1
    torch.testing.assert_close(got, logits(model, "eager", given))


def test_a_part_without_attention_is_allowed():
    resnet = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    sizes = {f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("layers", 1), ("ffn_dim", 16))}
    config = hf.DetrConfig(**sizes, d_model=16, encoder_attention_heads=2, decoder_attention_heads=2)
    config.backbone_config, config.use_timm_backbone = resnet, False
    model = hf.DetrModel._from_config(config, attn_implementation="regard")
    assert len(regard.hf.check(model)) == 3
    model.set_attn_implementation("eager")
    model.set_attn_implementation("regard")
    assert model.config._attn_implementation == "regard"


def test_the_error_names_an_implementation_for_each_part():
    sizes = {**SMALL, "num_attention_heads": 4, "intermediate_size": 48}
    parts = hf.BertConfig(**sizes), hf.RoFormerConfig(**sizes, embedding_size=32)
    joined = hf.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    advice = {"encoder": "regard", "decoder": "eager"}
    with pytest.raises(ValueError, match=r"roformer .* attn_implementation=" + re.escape(str(advice)) + "$"):
        hf.EncoderDecoderModel._from_config(joined, attn_implementation="regard")
    model = hf.EncoderDecoderModel._from_config(joined, attn_implementation=advice)
    assert model.encoder.config._attn_implementation == "regard"
    with pytest.raises(ValueError, match=r"roformer models bypass .* expected a model that uses it$"):  # not a part
        hf.AutoModel.from_config(parts[1], attn_implementation="regard")


def test_check_finds_the_attentions():
    for name, (_, _, count) in MODELS.items():
        assert len(regard.hf.check(build(name))) == count, name


class Attack:
    def __init__(self, harm):
        self.harm = harm

    def __reduce__(self):
        return Path.touch, (self.harm,)


def test_loading_runs_no_code_of_a_checkpoint(tmp_path):
    """Neither its own code, nor a pickle, nor a downloaded attention kernel."""
    model, harm = build("llama"), tmp_path / "harm"
    for name in ("code", "pickle", "kernel", "attention"):
        model.save_pretrained(tmp_path / name)
    settings = json.loads((tmp_path / "code" / "config.json").read_text())
    mapped = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    changed = {
        "code": {"model_type": "own", "auto_map": mapped},
        "kernel": {"_attn_implementation": "kernels-community/flash-attn2"},
        "attention": {"attn_implementation": "kernels-community/flash-attn2"},
    }
    for name, change in changed.items():
        (tmp_path / name / "config.json").write_text(json.dumps(settings | change))
    (tmp_path / "code" / "own.py").write_text(f"open({str(harm)!r}, 'w').close()")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Attack(harm)}, tmp_path / "pickle" / "pytorch_model.bin")
    for name in ("code", "pickle"):
        with pytest.raises(ValueError, match="cannot be loaded"):
            regard.hf.load(str(tmp_path / name))
    for name in ("kernel", "attention"):
        loaded, tokenizer = regard.hf.load(str(tmp_path / name))
        assert loaded.config._attn_implementation == "eager" and tokenizer is None
    assert not harm.exists()
