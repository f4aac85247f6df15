"""`regard.audit`: its results, its conventions, and functions that are right."""

import functools
import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import regard
from regard import ALiBi, Causal, Documents, FermiDirac, Free, Rows, Transport, Tsallis, Window
from support.mutants import attend

DTYPES = (None, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Verified by hand; docs/audit.md has the reproducers.
OF_PYTORCH = {"lowest-mask", "masked-nan"}


def names(found):
    return {finding.name for finding in found.findings}


def eager(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ value


# --- functions that are right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("native", None),
        ("native", torch.bfloat16),
        ("native", torch.float16),
        ("torch", None),
        ("torch", torch.float16),
        ("sdpa", torch.bfloat16),
    ],
)
def test_backends_pass(backend, dtype):
    """The backend "sdpa" is PyTorch's function, with its gradient of rows of lowest numbers."""
    allow = ("lowest-mask",) if backend == "sdpa" else ()
    found = regard.audit(functools.partial(regard.attention, backend=backend), dtype=dtype, allow=allow)
    assert found.passed and len(found.cases) > 30 and not found.refusals, str(found)


@pytest.mark.parametrize(
    "problem",
    [
        Transport(Tsallis(1.5), prior=Causal()),
        Transport(FermiDirac(), marginal=Free(-2.8)),
        Transport(prior=Documents(torch.tensor([0] * 5 + [1] * 8 + [-1] * 2 + [2] * 6)), temperature=0.7),
        Transport(prior=Causal("bottom_right") * ALiBi(torch.tensor([0.5, 0.25])) * Window(5)),
    ],
    ids=repr,
)
def test_problems_pass(problem):
    """What is not passed is what the function does by itself. A causal prior is passed, and does no harm twice."""

    def function(query, key, value, is_causal=False, **options):
        return regard.attention(query, key, value, problem=problem, **options)

    found = regard.audit(function, problem, gradients=False)
    allowed = {"causal-alignment"} if problem.prior == Causal() else set()
    refused = [refusal for refusal in found.refusals if "alignment" not in refusal.message]
    assert names(found) <= allowed and not refused, str(found)


def test_learned_tensors_of_the_problem():
    """Gradients of tensors that the function owns are compared, if the declaration says that they are learned."""
    slopes = torch.tensor([0.5, 0.2, 0.1, 0.05], requires_grad=True)
    problem = Transport(prior=ALiBi(slopes, "top_left"))
    right = functools.partial(regard.attention, problem=problem)
    wrong = functools.partial(regard.attention, problem=Transport(prior=ALiBi(slopes.detach(), "top_left")))
    assert regard.audit(right, problem, dtype=torch.float32).passed
    assert names(regard.audit(wrong, problem, dtype=torch.float32)) == {"slopes-gradient"}


@by_dtype
def test_pytorch(dtype):
    found = regard.audit(F.scaled_dot_product_attention, dtype=dtype)
    expected = OF_PYTORCH if dtype != torch.float16 else {"masked-nan"}
    assert names(found) == expected, str(found)
    assert regard.audit(F.scaled_dot_product_attention, dtype=dtype, allow=OF_PYTORCH).passed


@by_dtype
def test_eager(dtype):
    """Plain softmax gives NaN for a row without keys, and 0 * NaN is NaN."""
    assert names(regard.audit(eager, dtype=dtype)) == {"empty-row", "masked-nan"}


def test_flex_attention():
    """In bfloat16, not compiled: to compile the forward pass of every case takes a minute."""
    from torch.nn.attention.flex_attention import flex_attention

    problem = Transport(prior=Causal() * ALiBi(torch.tensor([0.5, 0.2])), temperature=0.8)
    found = regard.audit(flex_attention, problem, softcap=5.0, convention="flex", dtype=torch.bfloat16)
    assert names(found) <= {"masked-nan"} and len(found.cases) > 25, str(found)
    assert not found.gradients and any("backward" in refusal.message for refusal in found.refusals)


def test_multihead_attention():
    """PyTorch's module, with the identity as its projections."""

    def function(query, key, value, attn_mask=None):
        (B, H, Tq, D), Tk = query.shape, key.shape[2]
        module = nn.MultiheadAttention(H * D, H, bias=False, batch_first=True).requires_grad_(False)
        module.in_proj_weight.copy_(torch.eye(H * D).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(H * D))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(B, H, Tq, Tk).flatten(0, 1)
            attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
        flat = (t.transpose(1, 2).flatten(2) for t in (query, key, value))
        out, _ = module(*flat, attn_mask=attn_mask, need_weights=False)
        return out.unflatten(2, (H, D)).transpose(1, 2)

    assert names(regard.audit(function)) <= OF_PYTORCH


@pytest.mark.parametrize("flash", [False, True])
def test_x_transformers(flash):
    attends = pytest.importorskip("x_transformers.attend")

    def function(query, key, value, attn_mask=None, is_causal=False, scale=None):
        is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
        attend = attends.Attend(causal=is_causal, scale=scale, flash=flash)
        mask, bias = (attn_mask, None) if is_bool else (None, attn_mask)
        return attend(query, key, value, mask=mask, attn_bias=bias)[0]

    found = regard.audit(function, Transport(prior=Causal("bottom_right")))  # its causal mask ends with the last key
    # With flash it is aligned top-left where there are more queries than keys; docs/audit.md has the reproducer.
    known = OF_PYTORCH | {"causal-alignment" if flash else "empty-row"}
    assert names(found) == known and len(found.cases) > 25, str(found)


def test_features():
    """Attention by features is attention with another kernel: it is no softmax, and the audit reports it."""
    found = regard.audit(regard.features.LinearAttention(), gradients=False)
    assert not found.passed and "wrong-output" in names(found)


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_functions_of_transformers(dtype):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
    from transformers.models.llama.modeling_llama import eager_attention_forward as llama

    regard.hf.register()
    sinks = Transport(prior=Causal(), marginal=Rows(sink=torch.zeros(4)))
    window = Transport(prior=Causal() * Window(5))
    audit = functools.partial(regard.audit, convention="transformers", dtype=dtype)
    assert names(audit(llama, window)) | names(audit(sdpa_attention_forward, window)) == set()
    assert names(audit(llama)) == names(audit(gpt_oss, sinks)) == {"masked-nan"}
    assert "sink-dropped" in names(audit(llama, sinks))  # it swallows s_aux
    for problem in (window, sinks):
        found = audit(ALL_ATTENTION_FUNCTIONS["regard"], problem)
        assert found.passed and len(found.cases) > 20, str(found)


# --- other conventions ------------------------------------------------------------------------------------------------


def varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale=None, causal=False, window_size=(-1, -1), bug=""):
    outs = []
    ends = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for start, stop, key_start, key_stop in ends:
        if bug == "leak":
            key_start, key_stop = 0, len(k)
        parts = (q[start:stop], k[key_start:key_stop], v[key_start:key_stop])
        query, key, value = (t.transpose(0, 1)[None] for t in parts)
        prior = Causal("top_left" if bug == "corner" else "bottom_right") if causal else None
        problem = Transport(prior=prior)
        out = regard.attention(
            query, key, value, scale=softmax_scale, problem=problem, enable_gqa=query.shape[1] != key.shape[1]
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def test_packed_sequences():
    found = regard.audit(varlen, convention="varlen")
    assert found.passed and {"ragged sequences", "causal, more keys than queries"} <= set(found.cases), str(found)
    wrong = regard.audit(functools.partial(varlen, bug="corner"), convention="varlen", gradients=False)
    assert "causal-alignment" in names(wrong)
    assert not regard.audit(functools.partial(varlen, bug="leak"), convention="varlen", gradients=False).passed


def test_a_convention_of_your_own():
    def function(q, k, v, options):
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)

    def convention(case):
        inputs = (case.query, case.key, case.value)
        options = {"attn_mask": case.attn_mask, "is_causal": case.is_causal, "scale": case.scale}
        return tuple(t.transpose(1, 2) for t in inputs), {"options": options}

    assert regard.audit(function, convention=convention).passed
    with pytest.raises(ValueError, match=r'convention: expected "sdpa", "flex", .* got "cuda"|got .cuda.'):
        regard.audit(function, convention="cuda")


# --- the checks notice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["output", "gradient", "lse"])
def test_one_wrong_element(part):
    """An error of 1e-4 in one entry is found, in the output, in a gradient and in lse."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[override]
            wrong = gradient.clone()
            wrong.view(-1)[3] += 1e-3
            return wrong

    def function(query, key, value, **options):
        value = Off.apply(value) if part == "gradient" else value
        out, aux = regard.attention(query, key, value, **options, return_aux=regard.AuxRequest(lse=True))
        lse = aux.lse
        if part != "gradient":
            wrong = torch.zeros_like(out if part == "output" else lse)
            wrong.view(-1)[-1] = 1e-4
            out, lse = (out + wrong, lse) if part == "output" else (out, lse + wrong)
        return out, lse

    found = regard.audit(function, dtype=torch.float32, gradients=part == "gradient")
    assert not found.passed
    assert any(part in finding.part for finding in found.findings), str(found)


def test_precision_is_not_a_constant():
    """An output rounded to bfloat16 is right for bfloat16 inputs and wrong for float32 ones."""

    def function(query, key, value, **options):
        return regard.attention(query, key, value, **options).bfloat16().to(query.dtype)

    assert regard.audit(function, dtype=torch.bfloat16).passed
    assert "precision" in names(regard.audit(function, dtype=torch.float32))


def test_other_misbehaviour():
    def changes_inputs(query, key, value, **options):
        out = regard.attention(query, key, value, **options)
        with torch.no_grad():
            query.mul_(2)
        return out

    def wrong_shape(query, key, value, **options):
        return regard.attention(query, key, value, **options).transpose(1, 2)

    def other_dtype(query, key, value, **options):
        return regard.attention(query, key, value, **options).double()

    assert "inputs-changed" in names(regard.audit(changes_inputs, gradients=False))
    assert "output-shape" in names(regard.audit(wrong_shape, gradients=False))
    found = regard.audit(other_dtype, gradients=False)
    assert names(found) == {"output-dtype"} and found.passed  # a warning


def test_dropout():
    def biased(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        out = regard.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out * (1 - dropout_p)

    assert names(regard.audit(biased, gradients=False)) == {"dropout-bias"}
    assert regard.audit(regard.attention, gradients=False).passed


# --- refusals and results ---------------------------------------------------------------------------------------------


def test_refusals():
    """What a function raises on is listed. A function that refuses everything does not pass."""

    def no_masks(query, key, value, is_causal=False, scale=None):
        if query.shape[2] != key.shape[2]:
            raise NotImplementedError("only self-attention")
        return attend(query, key, value, is_causal=is_causal, scale=scale)

    found = regard.audit(no_masks)
    messages = {refusal.message for refusal in found.refusals}
    assert found.passed and "the function takes no argument attn_mask" in messages
    assert "NotImplementedError: only self-attention" in messages

    def never(query, key, value, **options):
        raise RuntimeError("not today")

    found = regard.audit(never)
    assert not found.passed and names(found) == {"nothing-ran"} and "not today" in found.findings[0].message


def test_a_function_without_the_argument_does_it_by_itself():
    sink = torch.tensor([1.0, -1.0, 0.5, 2.0])
    problem = Transport(prior=Causal(), marginal=Rows(sink=sink))

    def function(query, key, value, attn_mask=None, scale=None):
        return attend(query, key, value, attn_mask, True, scale, sink=sink)

    assert regard.audit(function, problem).passed


def test_arguments():
    with pytest.raises(TypeError, match="function: expected a function, got 3"):
        regard.audit(3)
    with pytest.raises(TypeError, match="problem: expected a Transport or None"):
        regard.audit(eager, "causal")
    with pytest.raises(TypeError, match="dtype: expected a floating-point dtype"):
        regard.audit(eager, dtype=torch.int32)
    with pytest.raises(ValueError, match="problem: expected one-sided rows"):
        regard.audit(eager, Transport(marginal=regard.RowsAndColumns()))


def test_results_show_themselves():
    found = regard.audit(functools.partial(attend, bug="no scale"), gradients=False)
    assert repr(found).startswith("Audit(attend: failed, ") and "findings: scale-missing" in repr(found)
    text = str(found)
    assert text.splitlines()[0].startswith("attend FAILED: 1 error in ")
    assert "error: scale-missing" in text and "the scores are not scaled" in text and "allowed" in text
    record = json.loads(found.to_json())
    assert record["passed"] is False and record["findings"][0]["name"] == "scale-missing"
    assert "scale-missing" in found._repr_html_() and "attend FAILED" in found._repr_html_()
    console = Console(width=100, file=io.StringIO())
    console.print(found)
    assert "scale-missing" in console.file.getvalue()


def test_the_same_seed_gives_the_same_result():
    broken = functools.partial(attend, bug="no sink")
    problem = Transport(marginal=Rows(sink=0.5))
    one, two, other = (regard.audit(broken, problem, gradients=False, seed=seed).to_json() for seed in (0, 0, 1))
    assert one == two != other
    state = torch.random.get_rng_state()
    regard.audit(eager, gradients=False)
    assert torch.equal(state, torch.random.get_rng_state())


def test_assert_attention():
    regard.testing.assert_attention(attend)
    with pytest.raises(AssertionError, match=r"error: causal-dropped\n  this is attention without its causal mask"):
        regard.testing.assert_attention(functools.partial(attend, bug="not causal"), Transport(prior=Causal()))
    regard.testing.assert_attention(F.scaled_dot_product_attention, allow=OF_PYTORCH)


def test_progress():
    seen = []
    regard.audit(attend, gradients=False, progress=lambda what, number, total: seen.append((what, number, total)))
    assert seen[0] == ("plain", 0, seen[0][2]) and seen[-1] == ("diagnosis", seen[0][2], seen[0][2])
