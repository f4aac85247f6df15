"""Attention by features in transformers models: forward, generation with a cache, inspection, and what raises."""

import pytest
import torch
import transformers

import regard
from regard.features import Features, LinearAttention
from support.features import MAPS, D, close, phi, seeded
from support.models import DECODER, TEXT

transformers.logging.set_verbosity_error()


def model_of(kind: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(TEXT if kind == "Bert" else DECODER) | changes)
    made = {"Bert": "BertForMaskedLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, made)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.double()


def by_whole_matrix(module: Features):
    """The same attention for transformers, from the whole matrix of weights and an explicit mask."""

    def attend(layer, query, key, value, attention_mask, scaling=None, **_):
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        weights = phi(module, query, scaling) @ phi(module, key, scaling).mT
        if attention_mask is not None:
            weights = weights * attention_mask
        total = weights.sum(-1, keepdim=True)
        return (torch.where(total > 0, weights / total, 0.0) @ value).transpose(1, 2).contiguous(), None

    return attend


@pytest.fixture(params=["elu", "favor"])
def registered(request):
    module = MAPS[request.param](chunk=6)
    regard.hf.register("by-features", module)
    transformers.AttentionInterface.register("by-matrix", by_whole_matrix(module))
    transformers.masking_utils.AttentionMaskInterface.register(
        "by-matrix",
        lambda **kwargs: transformers.masking_utils.sdpa_mask(**kwargs | {"allow_is_causal_skip": False}),
    )
    return module


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_models(kind, side, registered):
    model = model_of(kind)
    ids = torch.randint(3, 64, (2, 20), generator=seeded())
    mask = torch.ones(2, 20, dtype=torch.long)
    if side is not None:
        mask[1, slice(0, 6) if side == "left" else slice(13, 20)] = 0
    found = {}
    for name in ("by-features", "by-matrix"):
        model.set_attn_implementation(name)
        found[name] = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    close(found["by-features"], found["by-matrix"], 1e-10)
    assert kind != "Llama" or found["by-features"].requires_grad


def test_generation_with_a_cache(registered):
    model = model_of("Llama")
    ids = torch.randint(3, 64, (2, 9), generator=seeded())
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    tokens = {}
    for name in ("by-features", "by-matrix"):
        model.set_attn_implementation(name)
        for cache in (True, False):
            tokens[name, cache] = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=cache
            )
    first = tokens["by-matrix", False]
    assert first.shape == (2, 17) and all(torch.equal(first, t) for t in tokens.values())
    # A prompt in two pieces: the queries of the second one see all keys before them.
    model.set_attn_implementation("by-features")
    whole = model(input_ids=ids).logits
    half = model(input_ids=ids[:, :5], use_cache=True)
    rest = model(input_ids=ids[:, 5:], past_key_values=half.past_key_values).logits
    close(torch.cat([half.logits, rest], 1), whole, 1e-10)


def test_unsupported_models_raise():
    regard.hf.register("by-features", LinearAttention())
    ids = torch.randint(3, 64, (2, 20), generator=seeded())
    mistral = model_of("Mistral", sliding_window=7)
    mistral.set_attn_implementation("by-features")
    with pytest.raises(ValueError, match=r"attention_mask: expected a causal or bidirectional model.*Window"):
        mistral(input_ids=ids)
    llama = model_of("Llama")
    llama.set_attn_implementation("by-features")
    with pytest.raises(ValueError, match=r"attention_mask: expected.*got a mask Tensor\(bool"):
        llama(input_ids=ids, attention_mask=torch.ones(2, 1, 20, 20, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match=r"attention_mask: expected a causal or bidirectional model.*Documents"):
        llama(input_ids=ids, position_ids=torch.arange(20).remainder(10)[None].expand(2, -1), use_cache=False)
    given = {name: torch.zeros(1, 2, 4, D) for name in ("query", "key", "value")} | {"module": llama}
    for extra, message in (
        ({"softcap": 2.0}, "softcap: expected none"),
        ({"dropout": 0.1}, "dropout: expected none"),
        ({"s_aux": torch.zeros(2)}, "s_aux: expected a model without sinks"),
        ({"position_bias": torch.zeros(1, 2, 4, 4)}, "attention_mask: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            regard.hf.attention_function(LinearAttention(), **given, **extra)
    with pytest.raises(TypeError, match=r"problem: expected a Transport, a module of regard\.features, a callable"):
        regard.hf.register("by-features", "features")


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_inspection(side, registered):
    model = model_of("Llama")
    model.set_attn_implementation("by-features")
    ids = torch.randint(3, 64, (2, 20), generator=seeded())
    mask = torch.ones(2, 20, dtype=torch.long)
    if side is not None:
        mask[1, slice(0, 6) if side == "left" else slice(13, 20)] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    seen = regard.inspect(model, given)
    assert seen.statistics == ("lse", "first_key_mass", "mass") and len(seen.layers) == 2
    assert seen.rows == int(mask.sum())
    assert seen.mean("lse").isfinite().all() and seen.mean("normalized_entropy").isnan().all()
    assert "by-features" in seen.about["problems"] and seen.summary() and seen.to_json() and seen.to_html()
    notes = [f for f in seen.findings() if f.value is None]
    assert any("entropy" in f.message for f in notes)
    if side is None:
        full = regard.inspect(model, given, statistics=("key_mass", "first_key_mass"))
        profile = full.layers[0].profile()  # for key 0: the mass that the queries send to it
        close(profile["key_mass"][0], full.mean("first_key_mass")[0], 1e-6)
    else:
        with pytest.raises(ValueError, match="key_mass"):
            regard.inspect(model, given, statistics=("key_mass",))
    with pytest.raises(ValueError, match="entropy needs every single weight"):
        regard.inspect(model, given, statistics=("entropy",))
    for wrong in ("patterns", "views"):
        with pytest.raises(ValueError, match=f"{wrong}: expected False"):
            regard.inspect(model, given, **{wrong: True})
