"""Structured priors, unions and rules for the temperature under a registered name, in a small Llama.

The reference is the same model with the prior written out, as a dense `Bias` or a mask, or a temperature per row."""

import math

import pytest
import torch
import transformers as hf

import regard
from regard import (
    Bias,
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    LowRank,
    Prefix,
    Relative,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from support.models import build, inputs_of, logits

hf.logging.set_verbosity_error()
regard.hf.register()

T, H = 20, 4
ROW, COLUMN = torch.arange(T)[:, None], torch.arange(T)
generator = torch.Generator().manual_seed(3)
TABLE = torch.randn(H, 11, generator=generator, dtype=torch.float64)
QUERIES, KEYS = (torch.randn(1, h, T, 3, generator=generator, dtype=torch.float64) for h in (H, 2))
GATES = -torch.rand(1, H, T, generator=generator, dtype=torch.float64)
DENSITY = torch.rand(1, 1, T, T, generator=generator, dtype=torch.float64).clamp(min=0.05)
INDEX = torch.stack([torch.arange(T) // 4, torch.zeros(T).long()], -1)[None, None]  # the own block of 4, and the first
MAP = torch.rand(1, H, 5, 5, generator=generator) < 0.5
MAP |= torch.eye(5, dtype=torch.bool)


def masked(allowed):
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)


def by_block(blocks, size):
    return blocks.repeat_interleave(size, -1).repeat_interleave(size, -2)


def by_function(b, h, i, j):
    return TABLE[h, (j - i).clamp(-5, 5) + 5] ** 2


PRIORS = {  # name -> (prior, the same as log pi [.., T, T])
    "relative": (Relative(TABLE), TABLE[:, (COLUMN - ROW).clamp(-5, 5) + 5]),
    "function": (regard.prior(by_function), TABLE[:, (COLUMN - ROW).clamp(-5, 5) + 5] ** 2),
    "low rank": (LowRank(QUERIES, KEYS), QUERIES @ KEYS.repeat_interleave(2, 1).mT),
    "decay": (Decay(GATES), (GATES.cumsum(-1)[..., :, None] - GATES.cumsum(-1)[..., None, :]).clamp(max=0)),
    "density": (Density(DENSITY), DENSITY.log()),
    "selected": (Selected(INDEX, 4), masked((COLUMN // 4 == ROW // 4) | (COLUMN < 4))),
    "prefix": (Prefix(9), masked((COLUMN < 9) & (ROW >= 0))),
    "blocks": (Blocks(MAP, 4), masked(by_block(MAP, 4))),
    "window or prefix": (Window(3) | Prefix(2), masked(((COLUMN <= ROW) & (COLUMN >= ROW - 3)) | (COLUMN < 2))),
    "blocks or window": (Blocks(MAP, 4) | Window(2, 2), masked(by_block(MAP, 4) | ((COLUMN - ROW).abs() <= 2))),
    "product": (
        Relative(TABLE) * Decay(GATES) * (Window(3) | Prefix(2)),
        TABLE[:, (COLUMN - ROW).clamp(-5, 5) + 5]
        + (GATES.cumsum(-1)[..., :, None] - GATES.cumsum(-1)[..., None, :]).clamp(max=0)
        + masked(((COLUMN <= ROW) & (COLUMN >= ROW - 3)) | (COLUMN < 2)),
    ),
}


@pytest.mark.parametrize("regularizer", [None, Tsallis(1.5)], ids=["softmax", "entmax"])
@pytest.mark.parametrize("name", PRIORS)
def test_a_registered_prior_equals_its_dense_definition(name, regularizer, calls):
    prior, log_prior = PRIORS[name]
    model, given = build("llama").double(), inputs_of("llama")
    regard.hf.register("regard-structured", Transport(regularizer, prior=prior))
    regard.hf.register("regard-dense", Transport(regularizer, prior=Bias(log_prior)))
    got, expected = (logits(model, name, given) for name in ("regard-structured", "regard-dense"))
    assert len(calls) == 4 and torch.allclose(got, expected, atol=1e-6)
    assert not torch.allclose(got, logits(model, "eager", given), atol=1e-2)


@pytest.mark.parametrize("name", ["selected", "prefix", "blocks", "window or prefix"])
def test_a_registered_mask_equals_eager_with_that_mask(name):
    prior, log_prior = PRIORS[name]
    allowed = ((log_prior > -math.inf) & (COLUMN <= ROW)).reshape(1, -1, T, T).expand(2, -1, T, T)
    model, given = build("llama").double(), inputs_of("llama")
    regard.hf.register("regard-structured", Transport(prior=prior))
    got = logits(model, "regard-structured", given)
    expected = logits(model, "sdpa", given | {"attention_mask": allowed})
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("side", [None, "left"])
def test_a_temperature_by_keys_counts_the_keys_of_each_row(side, calls):
    slope = torch.tensor([0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
    regard.hf.register("regard-by-keys", Transport(temperature=ByKeys(slope, 0.2, 1.5)))
    model, given = build("llama").double(), inputs_of("llama", side)
    got = logits(model, "regard-by-keys", given)
    allowed = (COLUMN <= ROW) & given.get("attention_mask", torch.ones(2, T)).bool()[:, None, None]
    inverse = 0.2 + slope[:, None, None] * allowed.sum(-1, keepdim=True).clamp(min=1).log() ** 1.5
    regard.hf.register("regard-rows", Transport(temperature=1 / inverse))
    real = given.get("attention_mask", torch.ones(2, T)).bool()
    assert torch.allclose(got[real], logits(model, "regard-rows", given)[real], atol=1e-6) and len(calls) == 4


DECODED = {
    "relative": Transport(prior=Relative(TABLE)),
    "window or prefix": Transport(prior=Window(3) | Prefix(2)),
    "union times table": Transport(prior=Relative(TABLE) * (Window(3) | Prefix(2))),
    "by keys": Transport(temperature=ByKeys(torch.tensor([0.3, 0.5, 0.7, 0.9]))),
    "by keys in a union": Transport(prior=Window(3) | Prefix(2), temperature=ByKeys(0.7)),
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", DECODED)
def test_what_fits_every_length_decodes_as_the_whole_text(name, side, cache):
    model = build("llama").double()
    model.set_attn_implementation(regard.hf.register("regard-decoded", DECODED[name]))
    given = inputs_of("llama", side)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    static = {"cache_implementation": "static"} if cache == "static" else {}
    got, whole = (model.generate(**given, **options, **more) for more in (static, {"use_cache": False}))
    assert torch.equal(got.sequences, whole.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(whole.logits), atol=1e-6, rtol=0)


POSITIONS = r"a prior that follows from positions \(Causal, Window, ALiBi, Relative\)"
REGIONS = "Causal, Window, Prefix and their unions"
FIXED = {
    "low rank": (LowRank(QUERIES, KEYS), r"LowRank\((query|key)_factor\)=.* 20 (queries|keys)", POSITIONS),
    "decay": (Decay(GATES), r"Decay\(log_forget\)=.* 20 keys", POSITIONS),
    "density": (Density(DENSITY), r"Density\(prior\)=.* 20 queries and 20 keys", POSITIONS),
    "selected": (Selected(INDEX, 4), r"Selected\(index\)=.* 20 queries", REGIONS),
    "blocks": (Blocks(MAP, 4), r"Blocks\(map\)=.* 17 to 20 queries and 17 to 20 keys", REGIONS),
    "union": (Prefix(3) | Blocks(MAP, 4), r"Blocks\(map\)=.* 17 to 20 queries and 17 to 20 keys", REGIONS),
}


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", FIXED)
def test_what_is_made_for_one_length_raises_with_the_remedy(name, cache):
    prior, part, remedy = FIXED[name]
    model = build("llama")
    model.set_attn_implementation(regard.hf.register("regard-fixed", Transport(prior=prior)))
    tokens = inputs_of("llama")["input_ids"]
    assert model(tokens).logits.isfinite().all()  # the length that it is made for
    options = {"none": {"use_cache": False}, "static": {"cache_implementation": "static"}}.get(cache, {})
    with pytest.raises(ValueError, match=rf"^problem: expected tensors that fit every call .* got {part}.*; {remedy}"):
        model.generate(tokens, max_new_tokens=4, do_sample=False, **options)


def test_a_slope_per_query_raises_with_the_remedy():
    problem = Transport(temperature=ByKeys(torch.ones(H, T, 1)))
    model = build("llama")
    model.set_attn_implementation(regard.hf.register("regard-fixed", problem))
    with pytest.raises(ValueError, match=r"got ByKeys\(slope\)=.*20 queries.*; a tensor per head"):
        model(inputs_of("llama")["input_ids"][:, :12])


@pytest.mark.parametrize("name", PRIORS)
def test_a_checkpoint_needs_the_prior_that_it_was_saved_with(name, tmp_path):
    """The configuration holds the problem as JSON, from which the same problem can be registered again."""
    problem = Transport(prior=PRIORS[name][0], temperature=ByKeys(0.5, 0.1))
    model, given = build("llama").double(), inputs_of("llama")
    expected = logits(model, regard.hf.register("regard-saved", problem), given)
    model.save_pretrained(tmp_path)
    regard.hf.register("regard-saved", Transport(prior=Causal()))
    with pytest.raises(ValueError, match="regard-saved"):
        hf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="regard-saved")
    entry = hf.AutoConfig.from_pretrained(tmp_path).regard_problem
    regard.hf.register(entry["name"], Transport.from_json(entry["problem"], allow_imports=name == "function"))
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="regard-saved", dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(again.eval()(**given).logits, expected)
