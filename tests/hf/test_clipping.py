"""QK-clip of whole transformers models: every layout of the weights, the passes, and layers that cannot be clipped."""

import pytest
import torch
import transformers as hf

import regard
from regard.nn import qk_clip_
from support.models import LAYOUTS, MODELS, build, inputs_of

hf.logging.set_verbosity_error()


def model_of(name, monkeypatch):
    monkeypatch.setattr("support.models.MODELS", MODELS | LAYOUTS)
    return build(name).double()


def largest(model, given):
    return regard.inspect(model, given, statistics=["max_scores"]).maximum("max_scores")


def given_to(name):
    return {n: v.double() if v.is_floating_point() else v for n, v in inputs_of(name).items()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "bert", "vit", *LAYOUTS])
def test_no_score_exceeds_the_threshold(name, monkeypatch):
    model, given = model_of(name, monkeypatch), given_to(name)
    before, state = largest(model, given), {n: p.clone() for n, p in model.named_parameters()}
    threshold = float(before.median()) / 2
    factors = regard.hf.qk_clip_(model, given, threshold)
    after = largest(model, given)
    assert before.max() > 2 * threshold and after.max() <= threshold * (1 + 1e-6)
    assert factors.keys() == regard.hf.attentions(model).keys()
    assert all(factor.shape == (4,) and bool((factor <= 1).all()) for factor in factors.values())
    touched = {n for n, p in model.named_parameters() if not torch.equal(p, state[n])}
    assert touched and all(any(n.startswith(f"{name}.") for name in factors) for n in touched)
    # once more: nothing is above, nothing changes
    state = {n: p.clone() for n, p in model.named_parameters()}
    again = regard.hf.qk_clip_(model, given, threshold * (1 + 1e-5))
    assert all(bool((factor == 1).all()) for factor in again.values())
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


def test_latent_attention_is_clipped_as_in_kimi_k2(monkeypatch):
    """Not rotated: queries and keys by the square root. Rotated: the queries by the whole factor, because all heads
    share the keys."""
    attention = model_of("deepseek_v3", monkeypatch).model.layers[0].self_attn
    state = {n: p.clone() for n, p in attention.named_parameters()}
    scores = torch.tensor([50.0, 200.0, 100.0, 400.0])
    qk_clip_(attention, scores)
    queries, keys = (
        (getattr(attention, name).weight / state[f"{name}.weight"]).unflatten(0, (4, -1)).mean(-1)
        for name in ("q_b_proj", "kv_b_proj")
    )  # [H, rows of a head]: the factor on each row
    for head, factor in enumerate((1.0, 0.5, 1.0, 0.25)):
        expected = [factor**0.5] * 6 + [factor] * 4
        assert queries[head].tolist() == pytest.approx(expected)
        assert keys[head].tolist() == pytest.approx([factor**0.5] * 6 + [1.0] * 5)  # the values stay
    changed = {n for n, p in attention.named_parameters() if not torch.equal(p, state[n])}
    assert changed == {"q_b_proj.weight", "kv_b_proj.weight"}


@pytest.mark.parametrize("form", ["inspection", "dict"])
def test_a_model_is_clipped_by_scores_that_were_measured(form, monkeypatch):
    model, given = model_of("llama", monkeypatch), given_to("llama")
    with regard.watch(model, statistics=("max_scores",)) as seen:
        model(**given)
    before = seen.maximum("max_scores")
    names = [layer.name for layer in seen.layers]
    threshold = float(before.median())
    scores = seen if form == "inspection" else dict(zip(names, before, strict=True))
    factors = qk_clip_(model, scores, threshold)
    for name, row in zip(names, before, strict=True):
        torch.testing.assert_close(factors[name], (threshold / row).clamp(max=1))
    after = largest(model, given)
    torch.testing.assert_close(after[0], before[0].clamp(max=threshold))  # later layers have other inputs


def test_modules_of_pytorch():
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    weight = encoder.get_parameter("layers.1.self_attn.in_proj_weight")
    before = weight.clone()
    qk_clip_(encoder, {"layers.0.self_attn": torch.full((4,), 50.0), "layers.1.self_attn": torch.full((4,), 400.0)})
    torch.testing.assert_close(weight[:32], before[:32] / 2)
    assert torch.equal(weight[32:], before[32:])


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("t5", "encoder.block.0.layer.0.SelfAttention", "expected a MultiheadAttention .*, got T5Attention"),
        ("qwen3", "model.layers.0.self_attn", "expected no norm that all heads share, got q_norm"),
    ],
)
def test_an_error_names_the_layer(name, layer, reason, monkeypatch):
    model, given = model_of(name, monkeypatch), given_to(name)
    with pytest.raises((TypeError, ValueError), match=f"^{layer}: {reason}"):
        regard.hf.qk_clip_(model, given, 1e-3)


def test_if_one_layer_cannot_be_clipped_none_is(monkeypatch):
    model, given = model_of("llama", monkeypatch), given_to("llama")
    model.model.layers[1].self_attn.q_proj = torch.nn.Sequential(model.model.layers[1].self_attn.q_proj)
    state = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"^model\.layers\.1\.self_attn: expected a plain Linear for q_proj, got Seq"):
        regard.hf.qk_clip_(model, given, 1e-3)
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


def test_wrong_arguments(monkeypatch):
    model, given = model_of("llama", monkeypatch), given_to("llama")
    with pytest.raises(ValueError, match=r"max_scores: expected names of modules of LlamaForCausalLM, got 'x\.y'"):
        qk_clip_(model, {"x.y": torch.ones(4)})
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.self_attn: max_scores: expected one for each of .* 4 heads"
    ):
        qk_clip_(model, {"model.layers.0.self_attn": torch.ones(3)})
    with pytest.raises(ValueError, match="threshold: expected a positive, finite number, got 0"):
        regard.hf.qk_clip_(model, given, 0.0)
    with regard.watch(model, statistics=("mass",)) as seen:
        model(**given)
    with pytest.raises(ValueError, match="self_attn: max_scores: expected a layer with recorded max_scores"):
        qk_clip_(model, seen)


def test_padding_does_not_count(monkeypatch):
    model = model_of("llama", monkeypatch)
    tokens = torch.randint(3, 64, (1, 12))
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, 6:] = 0
    whole = regard.hf.qk_clip_(build("llama").double(), tokens[:, :6], 0.5)
    padded = regard.hf.qk_clip_(model, {"input_ids": tokens, "attention_mask": mask}, 0.5)
    for name, factor in whole.items():
        torch.testing.assert_close(padded[name], factor)


def test_all_batches_count(monkeypatch):
    model = model_of("llama", monkeypatch)
    batches = [torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    regard.hf.qk_clip_(model, batches, 1.0)
    assert max(float(largest(model, batch).max()) for batch in batches) <= 1 + 1e-6


def test_what_scaling_cannot_reach(monkeypatch):
    model, tokens = model_of("llama", monkeypatch), inputs_of("llama")["input_ids"]
    mask = torch.full((2, 1, 20, 20), 7.0, dtype=torch.float64)  # part of every score
    with pytest.raises(RuntimeError, match=r"self_attn: expected a largest score of at most 5 after 5 passes, got 7"):
        regard.hf.qk_clip_(model, {"input_ids": tokens, "attention_mask": mask}, 5.0)
    regard.hf.register("by-features", regard.features.LinearAttention())
    model.set_attn_implementation("by-features")
    with pytest.raises(ValueError, match="model: expected attention with scores, got features"):
        regard.hf.qk_clip_(model, tokens)
