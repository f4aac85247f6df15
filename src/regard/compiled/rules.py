"""What each of PyTorch's operations becomes in a graph. `docs/own.md` lists them for users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .._compat import TO_COPY
from .graph import BOOL, INT, REAL, Builder, Untraceable


class Operands(Protocol):
    """What a rule needs of the tracer."""

    builder: Builder

    def node(self, value: Any, what: str) -> int: ...


class Call(NamedTuple):
    """One operation that is traced."""

    tracer: Operands
    shown: str  # its name in messages
    name: str
    kind: str  # of the result

    @property
    def builder(self) -> Builder:
        return self.tracer.builder

    def node(self, value: Any) -> int:
        return self.tracer.node(value, self.shown)


def _real(op: str) -> Callable[..., int]:
    """The operation of this name on real numbers; integers are converted first."""
    return lambda call, *args: call.builder.call(op, *map(call.node, args))


def _arithmetic(op: str, logic: str | None = None) -> Callable[..., int]:
    """An operation on real numbers or on integers, as its result is; on truth values the operation `logic`."""

    def rule(call: Call, *args: Any) -> int:
        g, nodes = call.builder, [call.node(x) for x in args]
        if call.kind == BOOL:
            if logic is None:
                raise Untraceable(f"{call.shown} of truth values cannot be compiled")
            return g.logic(logic, *nodes)
        if call.kind == INT:
            _check_divisor(call, op, nodes)
            return g.integer(op, *nodes)
        return g.call(op, *nodes)

    return rule


def _check_divisor(call: Call, op: str, nodes: list[int]) -> None:
    """A division of integers by zero ends a process, so the divisor must be a number."""
    if op in ("remainder", "floor_divide", "trunc_divide"):
        divisor = call.builder.nodes[nodes[1]]
        if divisor.op != "constant" or not divisor.value:
            raise Untraceable(f"{call.shown} divides integers by something that may be zero: divide by a number")


def _sum(op: str, logic: str | None) -> Callable[..., int]:
    """a + alpha b and a - alpha b."""
    plain = _arithmetic(op, logic)

    def rule(call: Call, a: Any, b: Any, alpha: Any = 1) -> int:
        if alpha == 1:
            return plain(call, a, b)
        g, (x, y, factor) = call.builder, map(call.node, (a, b, alpha))
        if call.kind == INT:
            return g.integer(op, x, g.integer("mul", y, factor))
        return g.call(op, x, g.call("mul", y, factor))

    return rule


def _rsub(call: Call, a: Any, b: Any, alpha: Any = 1) -> int:
    return _sum("sub", None)(call, b, a) if alpha == 1 else _sum("sub", None)(call, b, a, alpha)


def _div(call: Call, a: Any, b: Any, rounding_mode: str | None = None) -> int:
    if rounding_mode is None:
        return _real("div")(call, a, b)
    if rounding_mode == "floor":
        return _arithmetic("floor_divide")(call, a, b)
    if call.kind == INT:
        return _arithmetic("trunc_divide")(call, a, b)
    return call.builder.call("trunc", _real("div")(call, a, b))


def _clamp(call: Call, x: Any, least: Any = None, most: Any = None, **named: Any) -> int:
    g, node = call.builder, call.node(x)
    least, most = named.get("min", least), named.get("max", most)
    for op, integer, bound in (("at_least", "maximum", least), ("at_most", "minimum", most)):
        if bound is not None:
            limit = call.node(bound)
            node = g.integer(integer, node, limit) if call.kind == INT else g.call(op, node, limit)
    return node


def _pow(call: Call, x: Any, y: Any) -> int:
    g, base, exponent = call.builder, call.node(x), call.node(y)
    power = g.nodes[exponent]
    if call.kind == INT:
        if power.op != "constant" or not 0 <= int(power.value) <= 64:  # type: ignore[arg-type]
            raise Untraceable(f"{call.shown} of integers: the exponent must be a number from 0 to 64")
        result = g.constant(1)
        for _ in range(int(power.value)):  # type: ignore[arg-type]
            result = g.integer("mul", result, base)
        return result
    if power.op == "constant" and power.value in (2, 3):
        base = g.cast(base, REAL)
        square = g.mul(base, base)
        return square if power.value == 2 else g.mul(square, base)
    if power.op == "constant" and power.value == 0.5:
        return g.call("sqrt", base)
    return g.call("pow", base, exponent)


def _comparison(op: str) -> Callable[..., int]:
    return lambda call, a, b: call.builder.compare(op, call.node(a), call.node(b))


def _logic(op: str) -> Callable[..., int]:
    return lambda call, *args: call.builder.logic(op, *map(call.node, args))


def _bitwise(op: str) -> Callable[..., int]:
    def rule(call: Call, *args: Any) -> int:
        nodes = [call.node(x) for x in args]
        return call.builder.logic(op, *nodes) if call.kind == BOOL else call.builder.integer(op, *nodes)

    return rule


def _shift(left: bool) -> Callable[..., int]:
    def rule(call: Call, x: Any, by: Any) -> int:
        node, count = call.node(x), call.builder.nodes[call.node(by)]
        if count.op != "constant" or not 0 <= int(count.value) < 62:  # type: ignore[arg-type]
            raise Untraceable(f"{call.shown} shifts by something that is not a number")
        factor = call.builder.constant(2 ** int(count.value))  # type: ignore[arg-type]
        return call.builder.integer("mul" if left else "floor_divide", node, factor)

    return rule


def _where(call: Call, condition: Any, a: Any, b: Any) -> int:
    return call.builder.cast(call.builder.where(*map(call.node, (condition, a, b))), call.kind)


def _softplus(call: Call, x: Any, beta: Any = 1, threshold: Any = 20) -> int:
    g, node = call.builder, call.builder.cast(call.node(x), REAL)
    factor = g.real(float(beta))
    scaled = g.mul(node, factor)
    return g.where(g.compare("gt", scaled, g.real(threshold)), node, g.div(g.call("softplus", scaled), factor))


def _composed(build: Callable[..., int]) -> Callable[..., int]:
    """A function of real nodes."""
    return lambda call, *args: build(call.builder, *(call.builder.cast(call.node(x), REAL) for x in args))


def _gelu(call: Call, x: Any, approximate: str = "none") -> int:
    g, node = call.builder, call.builder.cast(call.node(x), REAL)
    if approximate != "none":
        raise Untraceable("gelu with a tanh approximation cannot be compiled")
    return g.mul(g.mul(g.real(0.5), node), g.add(g.real(1.0), g.call("erf", g.mul(node, g.real(0.5**0.5)))))


def _cast(call: Call, x: Any, *_: Any, **__: Any) -> int:
    return call.builder.cast(call.node(x), call.kind)


def _uniform(value: float | None, at: int = 0) -> Callable[..., int]:
    """A tensor like another one, filled with one number (argument number `at` if `value` is None)."""

    def rule(call: Call, like: Any, *args: Any, **_: Any) -> int:
        g = call.builder
        return g.cast(call.node(args[at]) if value is None else g.constant(value), call.kind)

    return rule


def _elu(call: Call, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> int:
    g, node = call.builder, call.builder.cast(call.node(x), REAL)
    below = g.mul(g.real(alpha), g.call("expm1", g.mul(node, g.real(input_scale))))
    return g.mul(g.where(g.compare("gt", node, g.real(0.0)), node, below), g.real(scale))


def _isinf(call: Call, x: Any) -> int:
    g = call.builder
    node = g.cast(call.node(x), REAL)
    return g.compare("eq", g.call("abs", node), g.real(float("inf")))


def _isnan(call: Call, x: Any) -> int:
    g = call.builder
    node = g.cast(call.node(x), REAL)
    return g.compare("ne", node, node)


def _rounding(op: str) -> Callable[..., int]:
    def rule(call: Call, x: Any, decimals: int = 0) -> int:
        if decimals:
            raise Untraceable(f"{call.shown} to decimals cannot be compiled")
        return call.node(x) if call.kind == INT else call.builder.call(op, call.node(x))

    return rule


def _detach(call: Call, x: Any) -> int:
    node = call.node(x)
    return call.builder.call("stop", node) if call.kind == REAL else node


RULES: dict[str, Callable[..., int]] = {
    "add": _sum("add", "or"),
    "sub": _sum("sub", None),
    "rsub": _rsub,
    "mul": _arithmetic("mul", "and"),
    "div": _div,
    "floor_divide": _arithmetic("floor_divide"),
    "remainder": _arithmetic("remainder"),
    "neg": _arithmetic("neg"),
    "abs": _arithmetic("abs"),
    "sign": _arithmetic("sign"),
    "sgn": _arithmetic("sign"),
    "minimum": _arithmetic("minimum", "and"),
    "maximum": _arithmetic("maximum", "or"),
    "fmin": _arithmetic("minimum", "and"),
    "fmax": _arithmetic("maximum", "or"),
    "clamp": _clamp,
    "clamp_min": lambda call, x, least: _clamp(call, x, least, None),
    "clamp_max": lambda call, x, most: _clamp(call, x, None, most),
    "hardtanh": lambda call, x, least=-1.0, most=1.0: _clamp(call, x, least, most),
    **{name: _rounding(name) for name in ("floor", "ceil", "round", "trunc")},
    **{
        name: _real(name)
        for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "erf")
    },
    **{name: _real(name) for name in ("sin", "cos", "atan", "xlogy")},
    "log10": _composed(lambda g, x: g.mul(g.call("log", x), g.real(0.4342944819032518))),
    "pow": _pow,
    "reciprocal": _composed(lambda g, x: g.div(g.real(1.0), x)),
    "relu": lambda call, x: (
        call.builder.integer("maximum", call.node(x), call.builder.constant(0))
        if call.kind == INT
        else call.builder.call("relu", call.node(x))
    ),
    "softplus": _softplus,
    "silu": _composed(lambda g, x: g.mul(x, g.call("sigmoid", x))),
    "gelu": _gelu,
    "elu": _elu,
    "leaky_relu": lambda call, x, slope=0.01: _composed(
        lambda g, x: g.where(g.compare("gt", x, g.real(0.0)), x, g.mul(x, g.real(slope)))
    )(call, x),
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"logical_{op}": _logic(op) for op in ("and", "or", "xor", "not")},
    **{f"bitwise_{op}": _bitwise(op) for op in ("and", "or", "xor", "not")},
    "bitwise_left_shift": _shift(True),
    "bitwise_right_shift": _shift(False),
    "__lshift__": _shift(True),
    "__rshift__": _shift(False),
    "where": _where,
    "isnan": _isnan,
    "isinf": _isinf,
    TO_COPY: _cast,
    "clone": _cast,
    "alias": _cast,
    "expand": _cast,
    "lift_fresh": _cast,
    "detach": _detach,
    "full_like": _uniform(None),
    "zeros_like": _uniform(0),
    "ones_like": _uniform(1),
    "new_full": _uniform(None, 1),
    "new_zeros": _uniform(0),
    "new_ones": _uniform(1),
}
