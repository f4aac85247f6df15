"""QK-clip on each architecture, the entropy floor, and a training run that collapses without it."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations

import regard
from regard.nn import entropy_floor, qk_clip_
from support.models import LAYOUTS, MODELS, build, inputs_of

MODELS = MODELS | LAYOUTS

# --- QK-clip ----------------------------------------------------------------------------------------------------------


def model_of(name, monkeypatch):
    regard.hf.register()
    monkeypatch.setattr("support.models.MODELS", MODELS)
    changes = {"num_key_value_heads": 4} if name.endswith(", a key head each") else {}
    return build(name.split(",")[0], **changes).double()


@pytest.mark.parametrize("form", ["layer", "[H]", "[B, H, Tq]"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, a key head each",
        "gpt2",
        "mistral",
        "gemma2",
        "gpt_oss",
        "bert",
        "whisper",
        "vit",
        "phi3, a key head each",
        *LAYOUTS,
    ],
)
def test_the_largest_score_becomes_the_threshold(name, form, monkeypatch):
    model, given = model_of(name, monkeypatch), inputs_of(name.split(",")[0])
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    seen = []
    plain = regard.attention

    def spy(**call):
        out, aux = plain(**{**call, "return_aux": regard.AuxRequest(max_scores=True)})
        seen.append(aux.max_scores)
        return out, aux

    def scores():
        seen.clear()
        model.set_attn_implementation("regard")
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr("regard.hf.calls.attention", spy)
            model(**given)
        return seen[0]

    with regard.watch(model, statistics=("max_scores",)) as record, torch.no_grad():
        model(**given)
    layer = record.layers[0]
    attention = model.get_submodule(layer.name)
    rows = scores()
    before = rows.amax((0, 2))
    assert torch.allclose(layer.maxima[layer.channels.index("max_scores")], before)
    order = before.sort().values
    threshold = float(order[1] + order[2]) / 2  # two heads above
    over = before > threshold
    assert over.sum() == 2 and threshold > 0
    state = {n: p.clone() for n, p in attention.named_parameters()}
    factor = qk_clip_(attention, {"layer": layer, "[H]": before, "[B, H, Tq]": rows}[form], threshold)
    after = scores().amax((0, 2))
    assert torch.allclose(after[over], torch.full_like(after[over], threshold), rtol=1e-6), (before, after)
    assert torch.equal(after[~over], before[~over])
    assert torch.equal(factor < 1, over) and torch.equal(factor[~over], torch.ones(2).double())
    touched = {n for n, p in attention.named_parameters() if not torch.equal(p, state[n])}
    keys = {n for n in touched if n.startswith(("k_", "key"))}
    assert touched and bool(keys) == (name in ("llama, a key head each", "bert", "whisper", "vit"))
    assert not any(n.startswith(("v_", "o_", "value", "c_proj", "out_proj", "dense", "kv_a", "q_a")) for n in touched)
    # within the threshold nothing changes
    state = {n: p.clone() for n, p in attention.named_parameters()}
    assert torch.equal(qk_clip_(attention, after, threshold * (1 + 1e-5)), torch.ones(4).double())
    assert all(torch.equal(p, state[n]) for n, p in attention.named_parameters())


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}])
def test_multihead_attention(options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        if module.bias_k is not None:
            module.bias_k.mul_(20)  # so that it has the largest scores
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    context = torch.randn(2, 7, options.get("kdim", 16), dtype=torch.float64)

    def scores():
        if module.in_proj_weight is None:
            q_weight, k_weight = module.q_proj_weight, module.k_proj_weight
        else:
            q_weight, k_weight, _ = module.in_proj_weight.chunk(3)
        bias = torch.zeros(48).double() if module.in_proj_bias is None else module.in_proj_bias
        q, k = x @ q_weight.mT + bias[:16], context @ k_weight.mT + bias[16:32]
        if module.bias_k is not None:
            k = torch.cat([k, module.bias_k.expand(2, 1, 16)], 1)
        q, k = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in (q, k))
        return regard.attention(q, k, k, return_aux=regard.AuxRequest(max_scores=True))[1].max_scores.detach()

    before = scores().amax((0, 2))
    threshold = float(before.sort().values[1:3].mean())
    values = None if module.in_proj_weight is None else module.in_proj_weight[32:].clone()
    qk_clip_(module, scores(), threshold)
    after = scores().amax((0, 2))
    assert torch.allclose(after[before > threshold], torch.tensor(threshold).double())
    assert torch.equal(after[before <= threshold], before[before <= threshold])
    assert values is None or torch.equal(module.in_proj_weight[32:], values)


def test_a_head_without_scores_keeps_its_weights():
    module = nn.MultiheadAttention(8, 2)
    scores = torch.tensor([-math.inf, 300.0])
    assert torch.allclose(qk_clip_(module, scores), torch.tensor([1.0, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("qwen3", ValueError, "expected no norm that all heads share, got q_norm"),
        ("gemma3", ValueError, "expected no norm that all heads share, got q_norm"),
        ("t5", TypeError, "expected a MultiheadAttention or a module with q_proj and k_proj.*got T5Attention"),
    ],
)
def test_attentions_that_cannot_be_clipped(name, error, message, monkeypatch):
    attention = next(iter(regard.hf.attentions(model_of(name, monkeypatch)).values()))
    state = {n: p.clone() for n, p in attention.named_parameters()}
    with pytest.raises(error, match=message):
        qk_clip_(attention, torch.full((4,), 200.0))
    assert all(torch.equal(p, state[n]) for n, p in attention.named_parameters())


def test_what_is_clamped_cannot_be_clipped():
    config = hf.OlmoConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, clip_qkv=8.0)
    attention = hf.OlmoForCausalLM(config).model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"expected projections that are not clamped, got clip_qkv=8\.0"):
        qk_clip_(attention, torch.full((32,), 200.0))


def test_rows_of_another_number_of_heads(monkeypatch):
    for name, projection in (("phi3", "qkv_proj"), ("gpt_neox", "query_key_value"), ("deepseek_v3", "q_b_proj")):
        attention = next(iter(regard.hf.attentions(model_of(name, monkeypatch)).values()))
        layer = getattr(attention, projection)
        setattr(attention, projection, nn.Linear(layer.in_features, layer.out_features + 1))
        with pytest.raises(ValueError, match=f"attention: expected 4 heads of [0-9]+ in {projection}, got [0-9]+ rows"):
            qk_clip_(attention, torch.full((4,), 200.0))


def test_qk_clip_names_wrong_arguments(monkeypatch):
    module = nn.MultiheadAttention(8, 2)
    for scores, error, message in (
        (
            torch.tensor([1.0, 2.0, 3.0]),
            ValueError,
            "max_scores: expected one for each of MultiheadAttention's 2 heads, got 3",
        ),
        (torch.tensor([1.0, math.nan]), ValueError, "max_scores: expected numbers"),
        (torch.tensor([1, 2]), TypeError, "max_scores: expected a floating-point tensor"),
        ([1.0, 2.0], TypeError, "max_scores: expected a floating-point tensor"),
    ):
        with pytest.raises(error, match=message):
            qk_clip_(module, scores)
    with pytest.raises(ValueError, match="threshold: expected a positive, finite number, got 0"):
        qk_clip_(module, torch.tensor([1.0, 2.0]), 0)
    gemma = build("gemma2").model.layers[0].self_attn
    with pytest.raises(ValueError, match="max_scores: expected less than the softcap 2, got 2"):
        qk_clip_(gemma, torch.full((4,), 2.0), 1.0)
    llama = build("llama").model.layers[0].self_attn
    llama.q_proj = parametrizations.weight_norm(llama.q_proj)
    with pytest.raises(TypeError, match="expected a plain Linear for q_proj, got ParametrizedLinear"):
        qk_clip_(llama, torch.full((4,), 200.0))
    llama.q_proj = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(TypeError, match="expected a plain Linear for q_proj, got Sequential"):
        qk_clip_(llama, torch.full((4,), 200.0))
    model = build("llama")
    with regard.watch(model, statistics=("mass",)) as record, torch.no_grad():
        model(**inputs_of("llama"))
    with pytest.raises(ValueError, match="max_scores: expected a layer with recorded max_scores"):
        qk_clip_(model.model.layers[0].self_attn, record.layers[0])


# --- the entropy floor ------------------------------------------------------------------------------------------------


def test_entropy_floor_values():
    entropy = torch.tensor([[0.5, 2.0, 0.0], [1.0, 0.2, 0.9]], dtype=torch.float64)
    assert entropy_floor(entropy, 1.0) == pytest.approx((0.5 + 1 + 0.8 + 0.1) / 6)
    assert entropy_floor(entropy, 1.0, power=2) == pytest.approx((0.25 + 1 + 0.64 + 0.01) / 6)
    rows = torch.tensor([True, True, False])
    assert entropy_floor(entropy, 1.0, rows=rows) == pytest.approx((0.5 + 0.8) / 4)
    keys = torch.tensor([[1.0, 8.0, 2.0], [8.0, 0.0, 8.0]])  # a row with one key, one with none
    assert entropy_floor(entropy, 1.0, keys=keys) == pytest.approx((0 + math.log(2) + 0 + 0.1) / 4)
    assert entropy_floor(entropy, 0.5, keys=keys, relative=True) == pytest.approx(
        (math.log(2) / 2 + math.log(8) / 2 - 1 + math.log(8) / 2 - 0.9) / 4
    )
    assert entropy_floor(entropy, 0.0) == 0
    assert entropy_floor(entropy, 9.0, rows=torch.zeros(3, dtype=torch.bool)) == 0


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_entropy_floor_gradient(power):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    request = regard.AuxRequest(entropy=True, support=True)

    def loss(q, k):
        aux = regard.attention(q, k, k, is_causal=True, scale=2.0, return_aux=request)[1]
        return entropy_floor(aux.entropy, 0.6, keys=aux.support, relative=True, power=power)

    assert loss(q, k) > 0.01
    torch.autograd.gradcheck(loss, (q, k))


def test_nan_in_a_row_that_is_left_out():
    entropy = torch.tensor([0.5, math.nan, -math.inf], requires_grad=True)
    loss = entropy_floor(entropy, 1.0, rows=torch.tensor([True, False, False]), power=2)
    loss.backward()
    assert loss == 0.25 and torch.equal(entropy.grad, torch.tensor([-1.0, 0.0, 0.0]))


def test_entropy_floor_names_wrong_arguments():
    entropy = torch.zeros(2, 3)
    for arguments, error, message in (
        (([1.0], 1.0), TypeError, "entropy: expected a floating-point tensor, got"),
        ((entropy, -1.0), ValueError, "floor: expected a number >= 0, got -1"),
        ((entropy, "high"), TypeError, "floor: expected a number, got 'high'"),
    ):
        with pytest.raises(error, match=message):
            entropy_floor(*arguments)
    with pytest.raises(ValueError, match="keys: expected a tensor with relative=True, got None"):
        entropy_floor(entropy, 0.5, relative=True)
    with pytest.raises(ValueError, match="floor: expected a share of at most 1, got 2"):
        entropy_floor(entropy, 2.0, keys=entropy, relative=True)
    with pytest.raises(ValueError, match="power: expected a number >= 1, got 0"):
        entropy_floor(entropy, 2.0, power=0.0)
    with pytest.raises(TypeError, match="rows: expected a bool tensor"):
        entropy_floor(entropy, 2.0, rows=entropy)


# --- a training run that collapses ------------------------------------------------------------------------------------


def test_the_floor_prevents_collapse():
    """A shorter run of examples/entropy_floor.py: no scale, a high learning rate, the same seed and batches."""
    path = Path(__file__).resolve().parents[2] / "examples" / "entropy_floor.py"
    spec = importlib.util.spec_from_file_location("entropy_floor_example", path)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # dataclass looks the module up there
    spec.loader.exec_module(example)
    alone, held = (example.train(floor, 1.0, 150) for floor in (None, 0.3))
    assert alone[0] == held[0]  # the first step is the same
    first, last, last_held = alone[:5], alone[-20:], held[-20:]
    share, loss = (lambda run, name=name: example.mean(run, name) for name in ("least", "loss"))
    assert share(first) > 0.25 and share(last) < 0.1  # it collapses ...
    assert min(record.least for record in held[30:]) > 0.3  # ... and the floor prevents it
    assert loss(last_held) < loss(last) - 0.15
    assert example.mean(last, "score") > 100 > 25 > example.mean(last_held, "score")


# --- the floor in a transformers model --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "bert"])
def test_entropies_of_a_model(name):
    """Values, rows that count, and the gradient of the loss, compared with eager attention."""
    model, given = build(name).train(), inputs_of(name, "right")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation("sdpa" if name != "gpt_oss" and name != "gemma2" else "eager")
    before = model.config._attn_implementation
    with regard.hf.entropies(model) as rows:
        model(**given, use_cache=False)
        loss = rows.floor(0.9, relative=True)
        loss.backward()
    assert model.config._attn_implementation == before and len(rows) == 2
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_attn_implementation("eager")
    real = given["attention_mask"].bool()[:, None]
    losses = []
    for e, weights in zip(rows, model(**given, output_attentions=True, use_cache=False).attentions, strict=True):
        p = weights
        if name == "gpt_oss":  # eager drops the sink's column
            p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
        entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)
        counted = real.expand_as(entropy)
        assert torch.allclose(e.entropy[counted], entropy[counted], atol=1e-4)
        assert torch.equal(e.rows, real)
        keys = (torch.arange(20) + 1).clamp(max=7 if name in ("gemma2", "gpt_oss") and not losses else 20)
        keys = real.sum(-1, keepdim=True).expand(2, 4, 20) if name == "bert" else keys + (name == "gpt_oss")
        counted = counted & (keys > 1)
        assert torch.equal(e.keys[counted], keys.expand_as(entropy)[counted].to(e.keys))
        losses.append((0.9 * keys.clamp(min=1).log() - entropy).relu()[counted].mean())
    expected = torch.stack(losses).mean()
    assert torch.allclose(loss, expected, rtol=1e-4) and expected > 0.01
    expected.backward()
    scale = max(float(p.abs().max()) for p in found.values())
    for n, parameter in model.named_parameters():
        gradient, other = (torch.zeros(()) if g is None else g for g in (found.get(n), parameter.grad))
        assert torch.allclose(gradient, other, atol=1e-3 * scale), n


def test_entropies_under_checkpointing_and_of_the_last_pass():
    model, given = build("mistral").double().train(), inputs_of("mistral") | {"use_cache": False}
    found = []
    for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if kwargs:
            model.gradient_checkpointing_enable(kwargs)
        model.zero_grad()
        with regard.hf.entropies(model) as rows:
            if kwargs == {"use_reentrant": True}:
                with pytest.raises(RuntimeError, match="use_reentrant=False"):
                    model(**given)
                continue
            model(**given)
            out = model(**given).logits
            assert [e.name for e in rows] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
            (out.logsumexp(-1).mean() + rows.floor(2.0)).backward()
            assert len(rows) == 2
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.allclose(found[0], found[1]) and found[0].abs().max() > 0


def test_entropies_without_gradient_raise():
    regard.hf.register("regard-entmax15", regard.Transport(regard.Tsallis(1.5)))
    model = build("llama")
    model.set_attn_implementation("regard-entmax15")
    with pytest.raises(ValueError, match="model: expected one that solves KL"), regard.hf.entropies(model):
        pass
    with (
        regard.hf.entropies(build("llama")) as rows,
        pytest.raises(RuntimeError, match="floor: expected a forward pass"),
    ):
        rows.floor(1.0)
