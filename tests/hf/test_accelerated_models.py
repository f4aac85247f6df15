"""Whole transformers models while regard has the place of PyTorch's CPU kernel: outputs and gradients as before."""

import pytest
import torch
import transformers as hf

import regard
from regard import acceleration
from regard.acceleration import calls
from regard.backends.native import engine
from support.operators import groups_heads
from support.tolerance import assert_as_good, pytorch_loss

pytestmark = pytest.mark.skipif(engine.extension()[0] is None, reason="the native engine is not built")
for dtype in (torch.float32, torch.bfloat16):
    pytorch_loss(dtype)  # measured here, where PyTorch's kernel is in its place

HKV = 2 if groups_heads() else 4
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(padded=False):
    given = {"input_ids": torch.randint(3, 64, (2, 33))}
    if padded:
        given["attention_mask"] = (torch.arange(33) < torch.tensor([[33], [20]])).long()
    return given


MODELS = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(vocab_size=64, **SMALL, **PLAIN)), text),
    "bert, padded": (lambda: hf.BertModel(hf.BertConfig(vocab_size=64, **SMALL, **PLAIN)), lambda: text(True)),
    "llama, grouped heads": (
        lambda: hf.LlamaModel(hf.LlamaConfig(vocab_size=64, num_key_value_heads=HKV, **SMALL)),
        text,
    ),
    "llama, padded": (lambda: hf.LlamaModel(hf.LlamaConfig(vocab_size=64, **SMALL)), lambda: text(True)),
    "vit": (
        lambda: hf.ViTModel(hf.ViTConfig(image_size=24, patch_size=4, **SMALL, **PLAIN), add_pooling_layer=False),
        lambda: {"pixel_values": torch.randn(2, 3, 24, 24)},
    ),
    "whisper encoder": (
        lambda: hf.WhisperModel(
            hf.WhisperConfig(
                vocab_size=64,
                d_model=32,
                num_mel_bins=8,
                max_source_positions=50,
                pad_token_id=0,
                encoder_layers=2,
                encoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_layers=1,
                decoder_attention_heads=4,
                decoder_ffn_dim=48,
            )
        ).get_encoder(),
        lambda: {"input_features": torch.randn(2, 8, 100)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, dtype, monkeypatch):
    monkeypatch.setattr(acceleration, "small", lambda *_, **__: False)
    make, draw = MODELS[name]
    model, given = make().train(), draw()
    assert model.config._attn_implementation == "sdpa"

    def results(dtype):
        model.to(dtype).zero_grad()
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}
        out = model(**cast).last_hidden_state
        out.square().mean().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"out": out.detach().clone()} | found

    model.to(dtype)  # rounded once, so that float64 has the same weights
    stock = results(dtype)
    before = calls.forward, calls.backward
    with regard.accelerated():
        mine = results(dtype)
    assert (calls.forward - before[0], calls.backward - before[1]) == (2, 2)  # one for each layer
    exact = results(torch.float64)
    for what, got in mine.items():
        assert_as_good(f"{name}: {what}", got, stock[what], exact[what])


@pytest.mark.parametrize("length", [9, 40])
def test_generation(length, monkeypatch):
    """Prefill and decoding with a cache: the same tokens."""
    monkeypatch.setattr(acceleration, "small", lambda *_, **__: False)
    torch.manual_seed(1)
    options = {"num_key_value_heads": HKV, "eos_token_id": None, "pad_token_id": 0} | SMALL
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, **options)).eval()
    ids = torch.randint(3, 64, (2, length))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    before = calls.forward
    with regard.accelerated():
        found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert calls.forward - before == 2 * 8 and torch.equal(found, expected)
