"""Masks and caches of transformers models: structured masks, generation, prefill in chunks, packed sequences."""

import math

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import regard
from support.models import DECODERS, MODELS, build, inputs_of, logits, padded
from support.stock import doubled, peer

hf.logging.set_verbosity_error()
regard.hf.register()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_generate(name, cache, calls):
    model = build(name).double()
    given = doubled(model, inputs_of(name))[1]
    given.pop("decoder_input_ids", None)
    if "input_features" not in given:
        given["attention_mask"] = padded("left")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    results = []
    for implementation in (peer(name), "regard"):
        model.set_attn_implementation(implementation)
        results.append(model.generate(**given, **options))
    assert len(calls) >= 12 * MODELS[name][2] / 3
    plain, got = results
    assert torch.equal(got.sequences, plain.sequences)
    assert torch.allclose(torch.stack(got.logits), torch.stack(plain.logits), atol=1e-4)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_in_chunks(name, cache, side, no_dense):
    model, given = build(name).double(), inputs_of(name)
    mask = padded(side or "none")
    model.set_attn_implementation("regard")
    whole = logits(model, "regard", given | {"attention_mask": mask})
    if cache == "static":
        past = hf.StaticCache(config=model.config, max_cache_len=32)
    else:
        past = hf.DynamicCache(config=model.config)
    parts, positions = [], (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for start, stop in ((0, 9), (9, 17), (17, 18), (18, 20)):
            window = slice(start, stop)
            parts.append(
                model(
                    input_ids=given["input_ids"][:, window],
                    attention_mask=mask[:, :stop] if side else None,
                    position_ids=positions[:, window],
                    past_key_values=past,
                ).logits
            )
    whole_positions = logits(model, "regard", given | {"attention_mask": mask, "position_ids": positions})
    real = mask.bool()
    assert torch.allclose(torch.cat(parts, 1)[real], whole_positions[real], atol=1e-4)
    assert side or torch.allclose(whole, whole_positions, atol=1e-4)


def test_packed_sequences(no_dense):
    for name in ("llama", "mistral"):
        model, tokens = build(name).double(), inputs_of(name)["input_ids"][:1]
        positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
        packed = logits(model, "regard", {"input_ids": tokens, "position_ids": positions, "use_cache": False})
        alone = [logits(model, "regard", {"input_ids": t}) for t in (tokens[:, :8], tokens[:, 8:])]
        assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-6)


def test_cu_seq_lens_describe_packed_sequences():
    model, tokens = build("llama").double(), inputs_of("llama")["input_ids"][:1]
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)
    given = {"input_ids": tokens, "use_cache": False, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    got = logits(model, "regard", given | {"position_ids": positions, "max_length_q": 12, "max_length_k": 12})
    expected = logits(model, "regard", {"input_ids": tokens, "position_ids": positions, "use_cache": False})
    assert torch.allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["bool", "lowest", "infinite", "graded"])
def test_four_dimensional_masks(kind):
    model, tokens = build("llama").double(), inputs_of("llama")["input_ids"]
    allowed = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(20, dtype=torch.bool)
    lowest = torch.zeros(2, 1, 20, 20, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    mask = {
        "bool": allowed,
        "lowest": lowest,
        "infinite": torch.zeros(2, 1, 20, 20, dtype=torch.float64).masked_fill(~allowed, -math.inf),
        "graded": lowest + torch.where(allowed, torch.rand(20, 20), 0.0),
    }[kind]
    got = logits(model, "regard", {"input_ids": tokens, "attention_mask": mask})
    expected = logits(model, "sdpa", {"input_ids": tokens, "attention_mask": mask})
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_row_masked_at_the_lowest_number_has_no_keys():
    q = torch.randn(1, 2, 3, 4)
    mask = torch.zeros(1, 1, 3, 3)
    mask[..., 1, :] = torch.finfo(torch.float32).min
    out, _ = regard.hf.attention_function(None, torch.nn.Module(), q, q, q, mask)
    assert torch.equal(out[:, 1], torch.zeros(1, 2, 4)) and out.shape == (1, 3, 2, 4)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_decoders_need_no_dense_mask(name, side, no_dense):
    model = build(name)
    assert logits(model, "regard", inputs_of(name, side)).isfinite().all()


def test_encoders_need_no_dense_mask(no_dense):
    for name in ("bert", "t5", "whisper", "vit"):
        logits(build(name), "regard", inputs_of(name, "right"))


@pytest.mark.parametrize("offset", [0, 3, 7])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize(
    "function",
    [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.sliding_window_bidirectional_mask_function(2),
    ],
)
def test_a_structured_mask_equals_the_mask_of_transformers(function, padding, offset):
    arguments = {
        "batch_size": 2,
        "q_length": 5,
        "kv_length": 12,
        "q_offset": offset,
        "mask_function": function,
        "attention_mask": None if padding is None else padded("left", T=12).bool(),
        "allow_is_causal_skip": False,
    }
    mask = regard.hf.make_mask(**arguments)
    expected = masking_utils.sdpa_mask(**arguments)
    assert isinstance(mask, regard.hf.StructuredMask) and "StructuredMask" in repr(mask)
    assert torch.equal(mask.dense(), expected)
    # any other operation receives the dense tensor
    assert torch.equal(mask[:, :, 1:3] & True, expected[:, :, 1:3]) and torch.equal(~mask, ~expected)
    with pytest.raises(NotImplementedError, match="clone"):
        mask.logical_not_()
    # as priors it gives the same attention
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 12, 8, dtype=torch.float64)
    got, _ = regard.hf.attention_function(None, torch.nn.Module(), q, k, k, mask)
    assert torch.allclose(got, regard.attention(q, k, k, expected, enable_gqa=True).transpose(1, 2), atol=1e-12)


def test_an_unknown_mask_function_gives_a_dense_mask():
    def every_second(batch, head, q, k):
        return (q - k) % 2 == 0

    joined = masking_utils.and_masks(masking_utils.causal_mask_function, every_second)
    mask = regard.hf.make_mask(batch_size=1, q_length=6, kv_length=6, mask_function=joined, allow_is_causal_skip=False)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, masking_utils.sdpa_mask(1, 6, 6, mask_function=joined, allow_is_causal_skip=False))


def test_a_window_without_a_mask():
    torch.manual_seed(0)
    module = torch.nn.Module()
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    for causal, allowed in ((True, (distance >= 0) & (distance < 3)), (False, distance.abs() < 3)):
        got, _ = regard.hf.attention_function(None, module, q, k, k, None, is_causal=causal, sliding_window=3)
        assert torch.allclose(got, regard.attention(q, k, k, allowed).transpose(1, 2), atol=1e-6)
    got, _ = regard.hf.attention_function(
        None, module, q[:, :, -1:], k, k, None, sliding_window=3
    )  # one step with a full cache
    assert torch.allclose(got, regard.attention(q[:, :, -1:], k[:, :, -3:], k[:, :, -3:]).transpose(1, 2), atol=1e-6)


def test_a_position_bias_of_a_static_cache():
    """The bias is as long as the cache, of which the prefill has filled only the first keys."""
    torch.manual_seed(0)
    q, k, bias = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 8, 4), torch.randn(1, 2, 3, 8)
    got, _ = regard.hf.attention_function(None, torch.nn.Module(), q, k, k, None, position_bias=bias)
    expected = regard.attention(q, k[:, :, :3], k[:, :, :3], bias[..., :3], is_causal=True)
    assert torch.allclose(got, expected.transpose(1, 2), atol=1e-6)
