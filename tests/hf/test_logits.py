"""Whole transformers models on regard give the same numbers as with their stock attention."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import regard
from regard import Transport
from support.checkpoints import stories260k
from support.models import MODELS, build, inputs_of, logits
from support.stock import assert_as_good, doubled, peer, stock

hf.logging.set_verbosity_error()
regard.hf.register()


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, side, calls):
    if side is not None and name in ("vit", "whisper"):
        side = None
    model, given = build(name), inputs_of(name, side)
    plain = logits(model, stock(name), given)
    assert not calls
    got = logits(model, "regard", given)
    assert len(calls) == MODELS[name][2]
    model, exact_given = doubled(model, given)
    exact = logits(model, "definition", exact_given)
    real = given["attention_mask"].bool() if side is not None and name != "t5" else None
    assert_as_good(got, plain, exact, real)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_in_bfloat16(name):
    model, given = build(name), inputs_of(name, "left")
    exact = logits(model.double(), "definition", given)
    model = model.bfloat16()
    plain, got = (logits(model, implementation, given) for implementation in (stock(name), "regard"))
    assert got.dtype == torch.bfloat16
    assert_as_good(got, plain, exact, given["attention_mask"].bool())


def test_the_comparison_detects_a_small_difference():
    regard.hf.register("regard-warm", Transport(temperature=1.0005))
    model, given = build("llama"), inputs_of("llama")
    plain, got = logits(model, "sdpa", given), logits(model, "regard-warm", given)
    with pytest.raises(AssertionError):
        assert_as_good(got, plain, logits(model.double(), "sdpa", given))


def test_stories260k(calls):
    model = stories260k()
    tokens = torch.randint(3, 512, (2, 200), generator=torch.Generator().manual_seed(0))
    plain, got = (logits(model, i, {"input_ids": tokens}) for i in ("sdpa", "regard"))
    assert len(calls) == 5
    assert_as_good(got, plain, logits(model.double(), "sdpa", {"input_ids": tokens}))
    with torch.no_grad():
        model.set_attn_implementation("regard")
        story = model.generate(torch.tensor([[1]]), max_new_tokens=60, do_sample=False)
        model.set_attn_implementation("sdpa")
        assert torch.equal(story, model.generate(torch.tensor([[1]]), max_new_tokens=60, do_sample=False))


# --- training and compiling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_gradients_of_a_training_step(name, calls):
    model, given = build(name).double(), inputs_of(name, "right")
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if name == "t5" and hasattr(module, "relative_attention_num_buckets"):
            module.dropout = 0.0
    found = []
    for implementation in (peer(name), "regard"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(**given).logits
        loss = F.cross_entropy(out.flatten(0, 1), given["input_ids"][:, : out.shape[1]].flatten())
        loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plain, got = found
    assert len(calls) == MODELS[name][2] and plain.keys() == got.keys()
    special = {"gpt_oss": "sinks", "t5": "relative_attention_bias"}.get(name, "q_proj")
    assert any(special in n and p.abs().max() > 0 for n, p in got.items())
    scale = max(float(p.abs().max()) for p in plain.values())
    for n, p in plain.items():
        assert torch.allclose(got[n], p, atol=1e-5 * scale, rtol=1e-4), n


def test_gradient_checkpointing():
    model, given = build("mistral").double().train(), inputs_of("mistral", "right")
    model.set_attn_implementation("regard")
    found = []
    for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if kwargs:
            model.gradient_checkpointing_enable(kwargs)
        model.zero_grad()
        model(**given, use_cache=False).logits.logsumexp(-1).sum().backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.allclose(found[1], found[0]) and torch.allclose(found[2], found[0])


def test_compiled(calls):
    model, given = build("mistral").double(), inputs_of("mistral", "left")
    expected = logits(model, "regard", given)
    before = len(calls)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got = compiled(**given, use_cache=False).logits
    real = given["attention_mask"].bool()
    assert before == 2 and torch.allclose(got[real], expected[real], atol=1e-6)
    torch._dynamo.reset()
