"""T5's position bias as a table: the same numbers as the model's dense tensor, without the tensor."""

import subprocess
import sys

import pytest
import torch

import regard
from regard import ByKeys, MatchKL, Transport, Tsallis
from support.memory import PEAK, reads_peak
from support.models import SEQUENCE, inputs_of, padded

hf = pytest.importorskip("transformers")
from regard.hf.biases import RelativeBias  # noqa: E402

SIZES = SEQUENCE | {"d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
NEAR = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 7}  # so that far keys share a bucket
EXPERTS = {
    "num_decoder_layers": 3,
    "num_experts": 2,
    "expert_capacity": 64,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
}
MODELS = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**SIZES, **NEAR)),
    "t5, default distances": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**SIZES)),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**SIZES, **NEAR)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**SIZES, **NEAR)),
    "switch": lambda: hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(**SIZES, **NEAR, **EXPERTS)
    ),
}


@pytest.fixture(autouse=True)
def registered():
    regard.hf.register()


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.5)
    return model


@pytest.fixture
def no_dense(monkeypatch):
    def refuse(self):
        raise AssertionError("the dense bias was made")

    monkeypatch.setattr(RelativeBias, "dense", refuse)


def gradients(model, implementation, given):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**given).logits
    out.logsumexp(-1).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_eager_attention(name, side, no_dense):
    model, given = build(name), inputs_of("t5", side)
    (expected, by_eager), (got, by_table) = (gradients(model, i, given) for i in ("eager", "regard"))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    biases = [n for n in by_eager if "relative_attention_bias" in n]
    assert len(biases) == (6 if name == "umt5" else 2) and all(by_eager[n].any() for n in biases)
    assert by_table.keys() == by_eager.keys()
    for n, expected in by_eager.items():
        torch.testing.assert_close(by_table[n], expected, rtol=1e-7, atol=1e-7, msg=n)


@pytest.mark.parametrize("name", MODELS)
def test_generate_with_a_cache(name, no_dense):
    model, given = build(name), {"input_ids": inputs_of("t5")["input_ids"], "attention_mask": padded("left")}
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        out = model.generate(**given, **options)
        found.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, no_dense):
    model, given = build("t5").train(), inputs_of("t5", "right")
    _, expected = gradients(model, "regard", given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # that kind needs an input with a gradient
        model.enable_input_require_grads()
    _, got = gradients(model, "regard", given)
    assert got.keys() == expected.keys()
    for n, gradient in expected.items():
        torch.testing.assert_close(got[n], gradient, msg=n)


PROBLEMS = {
    "temperature": (Transport(temperature=0.7), True),
    "temperature per head": (Transport(temperature=torch.linspace(0.5, 2, 4)[:, None, None]), True),
    "temperature of all heads": (Transport(temperature=torch.tensor(0.7)), True),
    "temperature per query": (Transport(temperature=torch.linspace(0.5, 2, 20)[:, None]), False),
    "hard": (Transport(temperature=0.0), False),
    "budget": (Transport(temperature=MatchKL(0.5)), False),
    "by keys": (Transport(temperature=ByKeys(0.5, 0.1)), False),
    "entmax": (Transport(Tsallis(1.5)), False),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_bias_stays_a_part_of_the_score(name, monkeypatch):
    problem, by_table = PROBLEMS[name]
    regard.hf.register("problem-of-t5", problem)
    model, given = build("t5").encoder, {"input_ids": inputs_of("t5")["input_ids"]}
    model.set_attn_implementation("problem-of-t5")
    made, dense = [], RelativeBias.dense
    monkeypatch.setattr(RelativeBias, "dense", lambda self: made.append(self) or dense(self))
    with torch.no_grad():
        got = model(**given).last_hidden_state
        assert bool(made) != by_table
        monkeypatch.setattr(RelativeBias, "as_prior", lambda *_: None)
        expected = model(**given).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_learned_temperature_divides_the_bias(monkeypatch, no_dense):
    model, given = build("t5"), inputs_of("t5", "right")
    regard.hf.retrofit(model, learn="temperature")
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "log_temperature" in n:
                p.copy_(torch.linspace(-0.5, 0.5, 4))
    got, by_table = gradients(model, "regard", given)
    monkeypatch.undo()
    monkeypatch.setattr(RelativeBias, "as_prior", lambda *_: None)
    expected, by_tensor = gradients(model, "regard", given)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    assert any("log_temperature" in n for n in by_table)
    for n, gradient in by_tensor.items():
        torch.testing.assert_close(by_table[n], gradient, rtol=1e-7, atol=1e-7, msg=n)


def test_other_implementations_get_the_tensor():
    model = build("t5")
    attention = model.encoder.block[0].layer[0].SelfAttention
    model.set_attn_implementation("regard")
    table = attention.compute_bias(5, 9, past_seen_tokens=4)
    assert isinstance(table, RelativeBias)
    model.set_attn_implementation("eager")
    dense = attention.compute_bias(5, 9, past_seen_tokens=4)
    assert isinstance(dense, torch.Tensor) and torch.equal(table.dense(), dense)
    cross = model.decoder.block[0].layer[1].EncDecAttention
    assert cross.has_relative_attention_bias is False


def test_torch_functions_get_the_tensor_with_its_gradient():
    model = build("t5")
    attention = model.encoder.block[0].layer[0].SelfAttention
    model.set_attn_implementation("regard")
    bias = attention.compute_bias(5, 9)
    expected, mask = bias.dense(), torch.randn(1, 1, 5, 9)
    for got in (torch.add(bias, mask), mask + bias, bias + mask):
        assert torch.equal(got, expected + mask)
    assert torch.equal(bias[:, :, -1:], expected[:, :, -1:]) and bias.shape == expected.shape
    bias.to(torch.float32).sum().backward()
    assert attention.relative_attention_bias.weight.grad.any()


def test_inspection_sees_the_bias_as_a_prior(no_dense):
    model, given = build("t5"), inputs_of("t5", "right")
    with torch.no_grad():
        expected = model(**given).logits
        seen = regard.inspect(model, given)
        torch.testing.assert_close(model(**given).logits, expected)
    assert len(seen.layers) == 9


@reads_peak
def test_memory_at_8k_tokens():
    """The dense bias of 8 heads takes 2 GiB, the scores of eager attention as much again for each layer."""
    program = """
import torch, regard
from transformers import T5Config, T5ForConditionalGeneration
regard.hf.register()
config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=8, dropout_rate=0.0)
model = T5ForConditionalGeneration(config)
model.set_attn_implementation("regard")
def step(T):
    tokens = torch.randint(1, 64, (1, T))
    model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits.square().mean().backward()
step(64)
before = peak()
step(8192)
print(peak() - before)
"""
    pytest.importorskip("regard._native")
    result = subprocess.run([sys.executable, "-c", PEAK + program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 500
