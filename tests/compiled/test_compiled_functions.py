"""Compiled functions against PyTorch, on every instruction set and at infinities, NaN and subnormal numbers."""

import ctypes
import math

import pytest
import torch

from regard.compiled import REAL, Unavailable, cpp, derivative, library, trace

pytestmark = pytest.mark.skipif(library.headers() is None, reason="no headers")

FUNCTIONS = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "erf": torch.erf,
    "abs": torch.abs,
    "relu": torch.relu,
    "sign": torch.sign,
    "floor": torch.floor,
    "round": torch.round,
    "clamp": lambda t: t.clamp(-1, 2),
    "remainder": lambda t: t % 1.5,
    "floor_divide": lambda t: t // 0.7,
    "minimum": lambda t: torch.minimum(t, -2 * t),
    "pow": lambda t: t**2.5,
    "reciprocal": lambda t: t.reciprocal(),
    "xlogy": lambda t: torch.xlogy(t, t),
    "integers": lambda t: ((t.clamp(-1e6, 1e6) * 3).long() // 5 % 7).to(t.dtype) + (t > 2) * 1.0,
    "wide": lambda t: (t.clamp(-1e3, 1e3).long() * 123456789012 % 1000003).to(t.dtype),
    "where": lambda t: torch.where(t > 0, torch.log(t), t * 2),
}
KERNEL = """
extern "C" __attribute__((visibility("default"))) void {name}_{suffix}(const {type} *x, {type} *y, int64_t n) {{
  for (int64_t i = 0; i < n; i += Simd<{type}>::N) {{
    Vec<{type}> out;
    {name}<{type}>(load(x + i), (const {type} *)nullptr, out);
    store(y + i, out);
  }}
}}
"""


def points(dtype):
    special = [
        0.0,
        -0.0,
        1,
        -1,
        math.inf,
        -math.inf,
        math.nan,
        1e-40,
        -1e-40,
        1e38,
        -1e38,
        88,
        89,
        -88,
        -104,
        1e-7,
        -1e-7,
    ]
    x = torch.cat([torch.linspace(-20, 20, 1000), torch.logspace(-30, 30, 500), torch.tensor(special)])
    return torch.nn.functional.pad(x, (0, -len(x) % 64), value=0.5).to(dtype)


@pytest.fixture
def compiled(isa):
    source = ['#include "engine/functions.h"']
    for name, function in FUNCTIONS.items():
        source.append(cpp.vector_function(trace(function, [("t", REAL)], broadcast=False).graph, f"of_{name}"))
        for type_, suffix in (("float", "f32"), ("double", "f64")):
            source.append(KERNEL.format(name=f"of_{name}", type=type_, suffix=suffix))
    try:
        return library.load("\n".join(source), isa)
    except Unavailable as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_functions(compiled, dtype):
    x = points(dtype)
    for name, function in FUNCTIONS.items():
        y = torch.empty_like(x)
        call = getattr(compiled.handle, f"of_{name}_{'f32' if dtype == torch.float32 else 'f64'}")
        call(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
        expected = function(x)
        # In float32 a few units in the last place; for exp without fused multiply-adds |x| units, so 1e-5 at x = 88.
        relative, absolute = (1e-14, 1e-15) if dtype == torch.float64 else (1.2e-5, 1e-6)
        finite = expected.isfinite() & (expected.abs() > torch.finfo(dtype).tiny)
        label = f"{name}: {{}}".format
        torch.testing.assert_close(y[finite], expected[finite], rtol=relative, atol=absolute, msg=label)
        rest = ~expected.isfinite()
        torch.testing.assert_close(y[rest], expected[rest], rtol=0, atol=0, equal_nan=True, msg=label)


def test_two_outputs_and_captured_numbers():
    width = torch.tensor(0.5)
    graph = trace(lambda t: torch.exp(t * width), [("t", REAL)], broadcast=False).graph
    text = cpp.vector_function(derivative(graph, "t"), "slope")
    assert "captured[0]" in text and "Vec<R> &out0" in text
