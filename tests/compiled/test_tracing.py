"""Tracing functions of PyTorch: which operations become nodes, what is captured, what raises Untraceable."""

import math

import pytest
import torch

from regard.compiled import INT, REAL, Untraceable, adjoints, derivative, evaluate, trace

PAIR = [("b", INT), ("h", INT), ("i", INT), ("j", INT)]
SLOPES = torch.nn.Parameter(torch.rand(8))
TABLE = torch.rand(8, 100)
DOCUMENTS = torch.arange(50) // 7

PRIORS = {
    "alibi": lambda b, h, i, j: -SLOPES[h] * (i - j).abs(),
    "documents": lambda b, h, i, j: torch.where(DOCUMENTS[i] == DOCUMENTS[j], 0.0, -math.inf),
    "table": lambda b, h, i, j: TABLE[h, (i - j).clamp(0, 99)],
    "derived": lambda b, h, i, j: torch.nn.functional.softplus(SLOPES)[h] * (i - j) / 7,
    "transposed": lambda b, h, i, j: TABLE.T[(i - j).abs(), h],
    "made inside": lambda b, h, i, j: torch.arange(10)[i % 10] * torch.tensor(0.5),
    "buckets": lambda b, h, i, j: TABLE[h, (torch.log2((i - j).abs() + 1) * 4).long().clamp(max=99)],
    "integers": lambda b, h, i, j: ((i * 7919 + j * 104729) % 1000).sub(500, alpha=2) // 3 + (i << 2) + (j >> 1),
    "logic": lambda b, h, i, j: ((i >= j) & ~(j > 5)) | (h == 1) ^ (b < 1),
    "truth": lambda b, h, i, j: (i >= j) * 2.5 + (i == j).float(),
    "scalar": lambda b, h, i, j: SLOPES[0] * i + SLOPES.sum() - 0 * j,
    "same": lambda b, h, i, j: SLOPES.float()[h] + TABLE.contiguous()[h, i] * i.long(),
    "parts": lambda b, h, i, j: SLOPES.chunk(2)[1][h % 4] + SLOPES.split(4)[0][h % 4] * j,
    "constant": lambda b, h, i, j: 0.25,
    "like": lambda b, h, i, j: torch.zeros_like(i) + torch.ones_like(j) * torch.full_like(h, 3),
    "to": lambda b, h, i, j: (i - j).to(torch.float32).square().neg() / (2 * 3.0**2),
    "divisions": lambda b, h, i, j: torch.div(i - j, 3, rounding_mode="trunc") + (i - j) // 3 + (j - i) % 4,
}


def arguments():
    return [torch.arange(n).view([n if m == at else 1 for m in range(4)]) for at, n in enumerate((2, 8, 9, 11))]


@pytest.mark.parametrize("name", PRIORS)
def test_graph_equals_function(name):
    function = PRIORS[name]
    traced = trace(function, PAIR)
    (found,) = evaluate(traced.graph, dict(zip("bhij", arguments(), strict=True)), traced.captured(), torch.float32)
    expected = torch.as_tensor(function(*arguments()))
    torch.testing.assert_close(found.to(expected.dtype).expand_as(expected), expected, rtol=1e-6, atol=1e-6)


LINKS = {
    "square": lambda t: torch.relu(t / 2) ** 2,
    "branch": lambda t: torch.where(t > 0, torch.log1p(t), torch.expm1(t)),
    "smooth": lambda t: torch.sigmoid(t) * torch.tanh(t) + torch.nn.functional.softplus(t, beta=2),
    "special": lambda t: torch.erf(t) + torch.exp2(t) + t.abs().rsqrt() + torch.xlogy(t.abs(), t.abs()),
    "powers": lambda t: t.abs() ** 2.5 + (t + 30) ** -1 + (t + 30).reciprocal() + (t + 30) ** t,
    "logs": lambda t: torch.log(t + 30) + torch.log2(t + 30) + torch.log10(t + 30) + torch.sqrt(t + 30),
    "limits": lambda t: t.clamp(-1, 2) + torch.minimum(t, 2 * t) + torch.maximum(t, -t) + t.clamp(min=0.5),
    "steps": lambda t: t.floor() * t + t.round() + t.ceil() + t.trunc() + t.sign() * t + t % 1.5,
    "waves": lambda t: torch.sin(t) * torch.cos(2 * t) + torch.atan(t),
    "activations": lambda t: torch.nn.functional.silu(t) + torch.nn.functional.gelu(t) + torch.nn.functional.elu(t),
    "captured": lambda t: t * SLOPES[2].double() + (2.0 - t) / 3 - (-t) * SLOPES.double().mean(),
}


@pytest.mark.parametrize("name", LINKS)
def test_derivative_equals_autograd(name):
    function = LINKS[name]
    t = (torch.linspace(-20, 20, 401, dtype=torch.float64) + 0.013).requires_grad_()
    traced = trace(function, [("t", REAL)], broadcast=False)
    value = function(t)
    (slope,) = torch.autograd.grad(value.sum(), t)
    captured = traced.captured()
    (found,) = evaluate(traced.graph, {"t": t}, captured, torch.float64)
    (forward,) = evaluate(derivative(traced.graph, "t"), {"t": t}, captured, torch.float64)
    place = [n for n, node in enumerate(traced.graph.nodes) if node.op == "input"]
    (reverse,) = evaluate(adjoints(traced.graph, place), {"t": t}, captured, torch.float64)
    torch.testing.assert_close(found, value)
    torch.testing.assert_close(forward.expand_as(slope), slope, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(reverse.expand_as(slope), slope, rtol=1e-9, atol=1e-12)


def test_captured_tensors_keep_their_gradient():
    raw = torch.nn.Parameter(torch.rand(8))
    traced = trace(lambda b, h, i, j: raw.exp()[h] * i + raw.detach()[h] * j, PAIR)
    assert traced.leaves[0] is raw
    with torch.no_grad():
        raw.add_(1.0)  # the recipe is repeated with the present values
    inputs = dict(zip("bhij", arguments(), strict=True))
    (value,) = evaluate(traced.graph, inputs, traced.captured(), torch.float64)
    (grad,) = torch.autograd.grad(value.sum(), raw)
    torch.testing.assert_close(grad, (raw.exp() * 11 * sum(range(9))).detach())


def test_no_grad_inside_of_the_function():
    def function(b, h, i, j):
        with torch.no_grad():
            kept = SLOPES[h]
        return kept * i + SLOPES[h]

    traced = trace(function, PAIR)
    (value,) = evaluate(traced.graph, dict(zip("bhij", arguments(), strict=True)), traced.captured(), torch.float32)
    (grad,) = torch.autograd.grad(value.sum(), SLOPES)
    torch.testing.assert_close(grad, torch.full((8,), 9.0))


def test_an_index_outside_gives_nan():
    traced = trace(lambda b, h, i, j: TABLE[h, i - j], PAIR)
    i, j = torch.tensor([0, 99, 100, 0]), torch.tensor([0, 0, 0, 101])
    inputs = {"b": i * 0, "h": i * 0, "i": i, "j": j}
    (value,) = evaluate(traced.graph, inputs, traced.captured(), torch.float32)
    torch.testing.assert_close(value[:2], TABLE[0, [0, 99]])
    assert value[2:].isnan().all()


def boom(*_):
    raise ValueError("boom")


COUNTER = []


def counts(b, h, i, j):
    COUNTER.append(1)
    return i * len(COUNTER)


HOSTILE = {
    "control flow": (lambda b, h, i, j: i if (i > 0).any() else j, "data-dependent|torch.any"),
    "item": (lambda b, h, i, j: i * SLOPES[0].item(), "reads the value of a tensor"),
    "bool": (lambda b, h, i, j: i if i[0, 0, 0, 0] > 0 else j, "torch.select|reads the value"),
    "cumsum": (lambda b, h, i, j: i.cumsum(2), "torch.cumsum"),
    "sum": (lambda b, h, i, j: i.sum(), "torch.sum"),
    "sort": (lambda b, h, i, j: i.sort(2).values, "torch.sort"),
    "random": (lambda b, h, i, j: torch.rand(()) * i, "torch.rand draws random numbers"),
    "dropout": (lambda b, h, i, j: torch.nn.functional.dropout(i * 1.0), "random"),
    "in place": (lambda b, h, i, j: SLOPES.detach().mul_(2)[h], "torch.mul_ writes to a captured tensor"),
    "in place on an index": (lambda b, h, i, j: i.add_(1), "torch.add_ writes"),
    "shape": (lambda b, h, i, j: i / i.shape[2], "different results"),
    "counter": (counts, "different results"),
    "broadcast": (lambda b, h, i, j: SLOPES[:, None, None] * (i - j), "whole tensor of shape .8, 1, 1."),
    "whole": (lambda b, h, i, j: TABLE[h] * i[..., None], "whole rows"),
    "transposed": (lambda b, h, i, j: i.transpose(2, 3), "torch.transpose"),
    "result": (lambda b, h, i, j: torch.zeros(4, 4) + SLOPES[0], "returned the shape|whole tensor"),
    "nothing": (lambda b, h, i, j: None, "returned NoneType"),
    "text": (lambda b, h, i, j: "0", "returned str"),
    "exception": (boom, "raised ValueError: boom"),
    "mask": (lambda b, h, i, j: DOCUMENTS[i.flatten() > 0], "torch.flatten|mask"),
    "division": (lambda b, h, i, j: i // (j + 1), "may be zero"),
    "zero": (lambda b, h, i, j: i % 0, "(?i)zero"),
    "shift by an index": (lambda b, h, i, j: i << j, "shifts by something that is not a number"),
    "power of an index": (lambda b, h, i, j: i**j, "exponent must be a number from 0 to 64"),
    "decimals": (lambda b, h, i, j: torch.round(i / 7, decimals=2), "to decimals cannot be compiled"),
    "tanh": (lambda b, h, i, j: torch.nn.functional.gelu(i / 7, approximate="tanh"), "tanh approximation"),
    "no elements": (lambda b, h, i, j: torch.zeros(0)[i], "without elements, of shape .0."),
    "complex": (lambda b, h, i, j: torch.exp(1j * i).real, "complex"),
    "matrix": (lambda b, h, i, j: (i * 1.0) @ (j * 1.0), "torch.matmul"),
    "numpy": (lambda b, h, i, j: torch.from_numpy(i.numpy() * 2), "whole tensor"),
}


def test_numbers_that_are_not_a_number():
    traced = trace(lambda b, h, i, j: torch.where(i >= j, 0.5, math.nan), PAIR)
    i, j = torch.tensor([1, 2]), torch.tensor([2, 1])
    (found,) = evaluate(traced.graph, {"b": i, "h": i, "i": i, "j": j}, [], torch.float64)
    assert found[0].isnan() and found[1] == 0.5


def test_a_function_without_end():
    def many(b, h, i, j):
        for n in range(3000):
            i = i * (j + n)
        return i

    with pytest.raises(Untraceable, match="at most 4000 are compiled"):
        trace(many, PAIR)


@pytest.mark.parametrize("name", HOSTILE)
def test_untraceable(name):
    function, message = HOSTILE[name]
    with pytest.raises(Untraceable, match=message):
        trace(function, PAIR)


def test_tracing_leaves_nothing_behind():
    """The modes are as before, and captured tensors have their values."""
    before = SLOPES.detach().clone()
    with pytest.raises(Untraceable):
        trace(lambda b, h, i, j: SLOPES.data.mul_(2)[h], PAIR)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.equal(before, SLOPES.detach())
    assert (SLOPES * 2).requires_grad
