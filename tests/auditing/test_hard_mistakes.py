"""Mistakes that hide: two at once, in problems of several parts, in long sums, or in some calls only."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import Causal, Rows, Transport, Window

PROBLEM = Transport(prior=Causal() * Window(5), marginal=Rows(sink=torch.zeros(4)))
CAP = 3.0


def several(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, sink=None, *, bugs=()):
    """Attention with a window, a sink, shared heads and a softcap. Each bug changes one of them."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat(1, group, 1, 1) if "heads" in bugs else t.repeat_interleave(group, 1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * (scale**2 if "scale" in bugs else scale)
    scores = scores if "cap" in bugs else CAP * (scores / CAP).tanh()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores if "mask" in bugs else scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + (attn_mask.detach() if "bias" in bugs else attn_mask)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    keep = (distance <= 5 + ("window" in bugs)) & ((distance >= 0) | (not is_causal))
    scores = scores.masked_fill(~keep, -math.inf)
    if "sink" not in bugs:
        level = sink.detach() if "sink gradient" in bugs else sink
        scores = torch.cat([scores, level[:, None, None].expand(*scores.shape[:-1], 1).to(scores)], -1)
        return scores.softmax(-1)[..., :-1] @ value
    return scores.softmax(-1).nan_to_num(0) @ value


def found_in(function, problem=None, **options):
    found = regard.audit(function, problem, **options)
    return {finding.name for finding in found.findings} - {"masked-nan", "lowest-mask"}


@pytest.mark.parametrize(
    ("bugs", "expected"),
    [
        ((), set()),
        (("window", "heads"), {"window-off-by-one", "gqa-order"}),
        (("sink", "window"), {"sink-dropped", "window-off-by-one"}),
        (("scale", "sink"), {"scale-twice", "sink-dropped"}),
        (("cap", "mask"), {"softcap-dropped", "mask-dropped"}),
        (("bias", "sink gradient"), {"bias-gradient", "sink-gradient"}),
    ],
    ids=lambda names: "+".join(sorted(names)) or "none",
)
def test_two_mistakes_in_a_problem_of_several_parts(bugs, expected):
    function = functools.partial(several, bugs=bugs)
    in_gradients = not bugs or "bias" in bugs
    assert found_in(function, PROBLEM, softcap=CAP, dtype=torch.float32, gradients=in_gradients) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_kept_in_half_precision(dtype):
    """A sum of many weights stops growing. Over the few keys of the other cases nothing shows."""

    def function(query, key, value):
        scores = (query.float() @ key.float().mT) * query.shape[-1] ** -0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp().to(dtype)
        terms = torch.cat([weights[..., None] * value[:, :, None], weights[..., None]], -1)
        total = torch.zeros_like(terms[..., 0, :])
        for term in terms.unbind(-2):
            total = total + term
        return total[..., :-1] / total[..., -1:]

    assert found_in(function, dtype=dtype, gradients=False) == {"precision"}


def test_a_mistake_in_every_third_call():
    """Cases that fail run again, so what comes and goes is named."""
    calls = itertools.count()

    def function(query, key, value, scale=None):
        out = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return out * 1.01 if next(calls) % 3 == 2 else out

    assert "nondeterministic" in found_in(function, dtype=torch.float32, gradients=False)


def test_rows_that_an_inverted_mask_leaves_empty():
    """Plain softmax gives NaN there; that is the inverted mask, too, and no second mistake."""

    def function(query, key, value, attn_mask=None, scale=None):
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ value

    assert found_in(function, gradients=False, dtype=torch.float32) == {"mask-inverted"}


@pytest.mark.parametrize(("bits", "expected"), [(22, set()), (18, {"precision"})])
def test_a_little_less_precise_passes_and_ten_times_does_not(bits, expected):
    """Values of `bits` bits instead of float32's 24."""

    def function(query, key, value, **options):
        size = 2.0 ** (value.abs().log2().floor() - bits + 1)
        return regard.attention(query, key, (value / size).round() * size, **options)

    assert found_in(function, dtype=torch.float32, gradients=False) == expected
