"""The stock attention of a transformers model, attention written out, and fixtures that observe regard's calls."""

import math

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import regard
from support.models import EAGER_ONLY


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


def assert_as_good(got, plain, exact, where=None):
    """The error against float64 is at most a few times that of the stock attention in the same dtype."""
    got, plain, exact = (t.double() if where is None else t.double()[where] for t in (got, plain, exact))
    rounding = torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float((got - exact).abs().max()) <= 4 * float((plain - exact).abs().max()) + 4 * rounding


def doubled(model, given):
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in given.items()}


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
