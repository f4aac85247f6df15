"""Whole transformers models on regard give the same numbers as with their stock attention."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers import masking_utils

import regard
from regard import Causal, Rows, Transport, Tsallis
from support.checkpoints import stories260k
from support.models import (
    DECODER,
    DECODERS,
    EAGER_ONLY,
    MODELS,
    TEXT,
    build,
    inputs_of,
    logits,
    padded,
)

hf.logging.set_verbosity_error()
regard.hf.register()


def stock(name):
    return "eager" if name in EAGER_ONLY else "sdpa"


def by_definition(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **_
):
    """Attention written out in the dtype of the inputs (transformers' eager rounds to float32, its masks overflow)."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -math.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, scores).softmax(-1)
    weights = weights.masked_fill(scores == -math.inf, 0.0)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


hf.AttentionInterface.register("definition", by_definition)
masking_utils.AttentionMaskInterface.register(
    "definition", lambda **kwargs: masking_utils.sdpa_mask(**kwargs | {"allow_is_causal_skip": False})
)


def peer(name):
    """The implementation that a float64 model is compared with."""
    return "definition" if name in EAGER_ONLY else "sdpa"


@pytest.fixture
def calls(monkeypatch):
    """The calls of regard.attention: a replacement that is never called proves nothing."""
    seen = []

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return regard.attention(*args, **kwargs)

    monkeypatch.setattr("regard.hf.calls.attention", counted)
    return seen


@pytest.fixture
def no_dense(monkeypatch):
    """Fails if a dense mask of more than one query is made."""
    plain = masking_utils.sdpa_mask

    def refuse(*args, **kwargs):
        mask = plain(*args, **kwargs)
        assert mask is None or kwargs["q_length"] == 1
        return mask

    def dense(mask):
        pytest.fail(f"{mask!r} was made dense")

    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    monkeypatch.setattr(regard.hf.StructuredMask, "dense", dense)


def assert_as_good(got, plain, exact, where=None):
    """The error against float64 is at most a few times that of the stock attention in the same dtype."""
    got, plain, exact = (t.double() if where is None else t.double()[where] for t in (got, plain, exact))
    rounding = torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float((got - exact).abs().max()) <= 4 * float((plain - exact).abs().max()) + 4 * rounding


def doubled(model, given):
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in given.items()}


# --- logits -----------------------------------------------------------------------------------------------------------


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


# --- masks and caches -------------------------------------------------------------------------------------------------


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


# --- problems ---------------------------------------------------------------------------------------------------------


def test_a_named_problem():
    entmax = pytest.importorskip("entmax")
    name = regard.hf.register("regard-entmax15", Transport(Tsallis(1.5)))
    assert name == "regard-entmax15"

    def by_entmax(module, query, key, value, attention_mask, scaling=None, **_):
        key, value = (t.repeat_interleave(2, 1) for t in (key, value))
        scores = (query @ key.mT * scaling).masked_fill(~attention_mask, -math.inf)
        return (entmax.entmax_bisect(scores, 1.5, n_iter=60) @ value).transpose(1, 2).contiguous(), None

    hf.AttentionInterface.register("entmax-oracle", by_entmax)
    masking_utils.AttentionMaskInterface.register(
        "entmax-oracle", lambda **kwargs: masking_utils.sdpa_mask(**kwargs | {"allow_is_causal_skip": False})
    )
    model, given = build("mistral").double(), inputs_of("mistral")
    got, expected = (logits(model, i, given) for i in (name, "entmax-oracle"))
    assert torch.allclose(got, expected, atol=1e-6)
    assert not torch.allclose(got, logits(model, "regard", given), atol=1e-2)


def test_a_problem_with_a_prior_of_its_own():
    regard.hf.register("regard-near", Transport(prior=Causal() * regard.Window(3)))
    model, given = build("llama").double(), inputs_of("llama")
    near = build("mistral", sliding_window=4).double()
    near.load_state_dict(model.state_dict())
    assert torch.allclose(logits(model, "regard-near", given), logits(near, "sdpa", given), atol=1e-6)


def test_names_and_problems_that_cannot_be_registered():
    for name in ("sdpa", "my-sdpa", "flex_attention", "a/b", "paged|regard", "flash", "eager", ""):
        with pytest.raises(ValueError, match="name"):
            regard.hf.register(name)
    with pytest.raises(TypeError, match="problem"):
        regard.hf.register("regard-bad", Tsallis(1.5))
    with pytest.raises(TypeError, match="name"):
        regard.hf.register(Transport())


def test_a_registered_problem_must_not_require_grad():
    """It belongs to no model: learned tensors would be in no state dict."""
    sink = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"problem: expected tensors that do not require grad, got marginal\.sink"):
        regard.hf.register("regard-learned", Transport(marginal=Rows(sink=sink)))
    assert "regard-learned" not in hf.AttentionInterface()

    class Scaled(regard.features.LinearAttention):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match="problem: expected tensors that do not require grad, got gain"):
        regard.hf.register("regard-learned", Scaled())
    name = regard.hf.register("regard-constant", Transport(marginal=Rows(sink=sink.detach())))
    assert logits(build("llama"), name, inputs_of("llama")).isfinite().all()


def test_sinks_need_plain_rows():
    regard.hf.register("regard-relaxed", Transport(marginal=Rows(relax=1.0)))
    with pytest.raises(ValueError, match="s_aux"):
        logits(build("gpt_oss"), "regard-relaxed", inputs_of("gpt_oss"))


def test_dropout_and_scaling_are_passed_on():
    q = torch.randn(1, 2, 3, 4)
    call = regard.hf.as_call(None, torch.nn.Module(), q, q, q, None, dropout=0.25, scaling=0.7, softcap=3.0)
    assert (call["dropout_p"], call["scale"], call["softcap"]) == (0.25, 0.7, 3.0)


# --- errors -----------------------------------------------------------------------------------------------------------


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
