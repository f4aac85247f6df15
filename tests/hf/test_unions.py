"""Masks of transformers that are unions: bidirectional prefixes, images inside of a text; and chunks."""

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import regard
from regard import ALiBi, Transport, tiles
from support.models import DECODER, padded

hf.logging.set_verbosity_error()
regard.hf.register()

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
LLAMA4 = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 6}
IMAGES = torch.zeros(2, 20, dtype=torch.long)  # token types: 1 is a token of an image
IMAGES[:, 3:7], IMAGES[:, 9:14], IMAGES[0, 14:18] = 1, 1, 1


def _gemma3():
    text = DECODER | {"sliding_window": 5, "query_pre_attn_scalar": 8}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_id=2)
    return hf.Gemma3ForConditionalGeneration(config)


def _paligemma():
    text = DECODER | {"model_type": "gemma", "hidden_act": "gelu"}
    vision = VISION | {"model_type": "siglip_vision_model", "projection_dim": 32}
    config = hf.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, image_token_id=2)
    return hf.PaliGemmaForConditionalGeneration(config)


def _llama4():
    config = hf.Llama4TextConfig(**DECODER, **LLAMA4, layer_types=["chunked_attention", "full_attention"])
    return hf.Llama4ForCausalLM(config)


# Eager gives NaN where a window contains padding only.
PEER = {"gemma3": "sdpa", "paligemma": "eager", "llama4": "eager"}
MODELS = {"gemma3": _gemma3, "paligemma": _paligemma, "llama4": _llama4}


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2 if parameter.dim() > 1 else 0.5)
    return model


def inputs_of(name, side=None):
    tokens = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens} | ({} if side is None else {"attention_mask": padded(side)})
    types = {"gemma3": IMAGES, "paligemma": (torch.arange(20) >= torch.tensor([[9], [12]])).long(), "llama4": None}
    return given if types[name] is None else given | {"token_type_ids": types[name]}


def logits(model, implementation, given):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**given).logits


def _output(call):
    return regard.attention(**{name: given for name, given in call.items() if name != "return_aux"})


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_union_masks_equal_eager_without_a_dense_mask(name, side, request, calls):
    model, given = build(name), inputs_of(name, side)
    expected = logits(model, PEER[name], given)
    request.getfixturevalue("no_dense")
    got = logits(model, "regard", given)
    assert len(calls) == 2 and all(call["attn_mask"] is None for call in calls)
    assert name == "llama4" or all("|" in repr(call["problem"].prior) for call in calls)
    real = given.get("attention_mask", torch.ones(2, 20)).bool()
    assert torch.allclose(got[real], expected[real], atol=1e-6)


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_union_masks_train_as_eager(name):
    model, given = build(name), inputs_of(name)
    gradients = []
    for implementation in (PEER[name], "regard"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        layer = model.model.language_model.layers[0].self_attn
        gradients.append(torch.cat([layer.q_proj.weight.grad, layer.v_proj.weight.grad]))
    assert gradients[0].abs().max() > 1e-3 and torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_union_masks_decode_as_eager(name, cache, side):
    """The prefill with the union, then steps with a cache: each step reads all earlier keys."""
    model, given = build(name), inputs_of(name, side)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    results = []
    for implementation in (PEER[name], "regard"):
        model.set_attn_implementation(implementation)
        results.append(model.generate(**given, **options))
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert torch.allclose(*(torch.stack(found.logits) for found in results), atol=1e-4)


def test_a_problem_multiplies_with_a_union(calls):
    """A registered problem holds inside of the model's mask."""
    slopes = torch.tensor([0.5, 0.1, 0.0, 1.0], dtype=torch.float64)
    name = regard.hf.register("regard-slopes", Transport(prior=ALiBi(slopes)))
    model, given = build("paligemma"), inputs_of("paligemma")
    got = logits(model, name, given)
    T, n = 20, torch.tensor([9, 12])[:, None, None, None]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    allowed = (j <= i) | ((j < n) & (i < n))
    for call in calls:
        bias = (-slopes[:, None, None] * (i - j).abs()).masked_fill(~allowed, -torch.inf)
        dense = {**call, "problem": None, "attn_mask": bias}
        assert torch.allclose(_output(call), _output(dense), atol=1e-12)
    assert got.isfinite().all()


if not hasattr(masking_utils, "blockwise_overlay"):
    pytest.skip("this version of transformers has no blockwise masks", allow_module_level=True)
BLOCK_IDS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, 1, -1, 2, 2], [0, 0, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1]])
CAUSAL, BLOCKS = masking_utils.causal_mask_function, masking_utils.blockwise_overlay(BLOCK_IDS)
FUNCTIONS = {
    "causal or blocks": masking_utils.or_masks(CAUSAL, BLOCKS),
    "window and (causal or blocks)": masking_utils.and_masks(
        masking_utils.or_masks(CAUSAL, BLOCKS), masking_utils.sliding_window_overlay(3)
    ),
    "(window and causal) or blocks": masking_utils.or_masks(
        masking_utils.sliding_window_causal_mask_function(3), BLOCKS
    ),
    "blocks or everything": masking_utils.or_masks(BLOCKS, masking_utils.bidirectional_mask_function),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "chunks or blocks": masking_utils.or_masks(
        masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3])), BLOCKS
    ),
    "packed or blocks": masking_utils.or_masks(
        masking_utils.and_masks(CAUSAL, masking_utils.packed_sequence_mask_function(BLOCK_IDS)), BLOCKS
    ),
}


@pytest.mark.parametrize("offset", [0, 3, 7])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_union_equals_the_mask_of_transformers(kind, padding, offset):
    arguments = {
        "batch_size": 2,
        "q_length": 5,
        "kv_length": 12,
        "q_offset": offset,
        "mask_function": FUNCTIONS[kind],
        "attention_mask": None if padding is None else padded("left", T=12).bool(),
        "allow_is_causal_skip": False,
        "use_vmap": False,
    }
    mask = regard.hf.make_mask(**arguments)
    expected = masking_utils.sdpa_mask(**arguments)
    assert isinstance(mask, regard.hf.StructuredMask) and torch.equal(mask.dense(), expected)
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 12, 8, dtype=torch.float64)
    got, _ = regard.hf.attention_function(None, torch.nn.Module(), q, k, k, mask)
    assert torch.allclose(got, regard.attention(q, k, k, expected, enable_gqa=True).transpose(1, 2), atol=1e-12)


def test_functions_of_a_model_and_short_ids_stay_dense():
    def last(batch, head, q, k):
        return q == 11

    for function in (masking_utils.or_masks(CAUSAL, last), masking_utils.blockwise_overlay(BLOCK_IDS[:, :9])):
        arguments = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": function}
        if function.__name__ == "or_mask":
            arguments |= {"q_length": 12, "kv_length": 12}
        mask = regard.hf.make_mask(**arguments, allow_is_causal_skip=False)
        expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert torch.equal(mask if type(mask) is torch.Tensor else mask.dense(), expected)
        assert (type(mask) is torch.Tensor) == (function.__name__ == "or_mask")


def test_the_cost_follows_the_admissible_area(calls):
    """A window of 64 beside one image: of 32 x 32 tiles the kernels visit few. The layers share one map of tiles."""
    T = 2048
    ids = torch.full((1, T), -1)
    ids[:, 256:512] = 0
    function = masking_utils.or_masks(
        masking_utils.sliding_window_causal_mask_function(64), masking_utils.blockwise_overlay(ids)
    )
    mask = regard.hf.make_mask(batch_size=1, q_length=T, kv_length=T, mask_function=function)
    factors, Tk = mask.priors()
    shape = regard.priors.PlanShape((1, 1), T, Tk, torch.float32, torch.device("cpu"))
    numbers, mixed = tiles.tile_map(factors[0], shape)
    assert Tk == T and int((numbers > 0).sum()) <= 2 * 32 + 16 and len(mixed) <= 2 + 2 * 32 + 16
    assert mask.priors()[0][0] is factors[0] and tiles.tile_map(mask.priors()[0][0], shape)[0] is numbers
