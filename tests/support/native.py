"""Calls of the native engine beside the definition in float64: cases, their tensors, and how a result is judged."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import ALiBi, AuxRequest, Bias, Causal, Documents, FermiDirac, Free, Rows, Transport, Tsallis, Window
from regard.backends import BACKENDS

engine = pytest.importorskip("regard._native", reason="the native engine was not built")

NAMES = regard.statistics.ROW_STATISTICS
stock_attention = F.scaled_dot_product_attention
FACTOR, FLOOR = 4.0, 4e-6


def error(found, truth, together=False):
    """Largest error, relative to 1 + |truth| of each entry, or with `together` of the largest entry. Equal infinities
    and NaN do not count."""
    found = found.double()
    same = (found == truth) | (found.isnan() & truth.isnan())
    size = truth.abs().max() if together and truth.numel() else truth.abs()
    gap = torch.where(same, 0.0, (found - truth).abs() / (1 + size))
    return gap.nan_to_num(nan=math.inf).max().item() if found.numel() else 0.0


def raised(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Case:
    """Tensors (leaves) by name, and a function that makes the arguments of a call from them."""

    def __init__(self, tensors, call, statistics=NAMES, **fixed):
        self.tensors, self.call, self.statistics, self.fixed = tensors, call, statistics, fixed

    def run(self, backend, dtype=None, gradients=True):
        tensors = {n: t.detach() if dtype is None else raised(t.detach(), dtype) for n, t in self.tensors.items()}
        learned = [t.requires_grad_() for t in tensors.values() if gradients and t.is_floating_point()]
        request = AuxRequest(**dict.fromkeys(self.statistics, True))
        arguments = dict(tensors)
        q, k, v = (arguments.pop(n) for n in ("q", "k", "v"))
        torch.manual_seed(11)
        out, aux = regard.attention(
            q, k, v, return_aux=request, backend=backend, enable_gqa=True, **self.call(**arguments), **self.fixed
        )
        results = {"out": out} | {n: getattr(aux, n) for n in self.statistics}
        if gradients:
            generator = torch.Generator().manual_seed(7)
            loss = 0.0
            for name in ("out", "lse", "entropy"):
                if name in results:
                    weight = torch.randn(results[name].shape, generator=generator).to(results[name].dtype)
                    finite = results[name].masked_fill(results[name].isinf(), 0.0)
                    loss = loss + (finite * weight).sum()
            found = torch.autograd.grad(loss, learned)
            names = [n for n, t in tensors.items() if t.is_floating_point()]
            results |= {f"grad {n}": g for n, g in zip(names, found, strict=True)}
        return {n: t.detach() for n, t in results.items()}

    def check(self, gradients=True):
        found = self.run("native", gradients=gradients)
        truth = self.run("torch", torch.float64, gradients)
        self.judge(found, truth, self.run("torch", gradients=gradients))

    differences: tuple[str, ...] = ("value_spread", "cost")  # differences of larger numbers, summed key by key
    many = 5  # how much more error they may have

    def judge(self, found, truth, plain, factor=FACTOR):
        half = self.tensors["q"].dtype in (torch.bfloat16, torch.float16)
        for name, value in found.items():
            total = max(1.0, truth[name].abs().nan_to_num(posinf=0).max().item()) if name.startswith("grad") else 1.0
            # Gradients of shared parameters are long sums, so the error is relative to the largest entry.
            shared = name.startswith("grad") and name not in ("grad q", "grad k", "grad v")
            lost = error(plain[name], truth[name], shared)
            floor = FLOOR * (20 if shared else 5 if total > 1 else self.many if name in self.differences else 1)
            if half:
                floor = (
                    torch.finfo(self.tensors["q"].dtype).eps if name == "out" or name.startswith("grad") else 5 * FLOOR
                )
            wrong = error(value, truth[name], shared)
            assert wrong <= factor * lost + floor, (name, wrong, lost, engine.isa())


def heads(generator, B, H, T, D, layout, dtype):
    """[B, H, T, D] in one of the memory layouts that models use."""
    if layout == "bhtd":
        return torch.randn(B, H, T, D, generator=generator).to(dtype)
    if layout == "bthd":
        return torch.randn(B, T, H, D, generator=generator).to(dtype).transpose(1, 2)
    if layout == "bhdt":  # last dimension strided
        return torch.randn(B, H, D, T, generator=generator).to(dtype).transpose(2, 3)
    return torch.randn(B, H, T, 3 * D + 1, generator=generator).to(dtype)[
        ..., D : 2 * D
    ]  # "cut" from a fused projection


def qkv(seed, B=2, H=4, Hkv=2, Tq=40, Tk=40, D=16, Dv=16, layout="bhtd", dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return {
        "q": heads(g, B, H, Tq, D, layout, dtype),
        "k": heads(g, B, Hkv, Tk, D, layout, dtype),
        "v": heads(g, B, Hkv, Tk, Dv, layout, dtype),
    }


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


END = "bottom_right"

PROBLEMS = {
    "plain": lambda H, Tq, Tk: ({}, dict),
    "causal": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Causal(END))}),
    "is_causal": lambda H, Tq, Tk: ({}, lambda: {"is_causal": True}),
    "window": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Window(9, 3, alignment=END))}),
    "strict past": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Window(9, -1, alignment=END))}),
    "alibi": lambda H, Tq, Tk: (
        {"slopes": uniform(1, H)},
        lambda slopes: {"problem": Transport(prior=Causal(END) * ALiBi(slopes))},
    ),
    "documents": lambda H, Tq, Tk: (
        {"ids": torch.arange(Tq) // 11 - 1, "key_ids": torch.arange(Tk) // 13 - 1},
        lambda ids, key_ids: {"problem": Transport(prior=Documents(ids, key_ids))},
    ),
    "mask": lambda H, Tq, Tk: ({"mask": uniform(2, 2, 1, Tq, Tk) > 0.7}, lambda mask: {"attn_mask": mask}),
    "padding": lambda H, Tq, Tk: ({"mask": uniform(3, 2, 1, 1, Tk) > 0.4}, lambda mask: {"attn_mask": mask}),
    "float mask": lambda H, Tq, Tk: (
        {
            "mask": normal(4, H, Tq, Tk).masked_fill(uniform(5, H, Tq, Tk) < 0.3, -math.inf),
            "tau": uniform(6, H, 1, 1) + 0.5,
        },
        lambda mask, tau: {"attn_mask": mask, "problem": Transport(temperature=tau)},
    ),
    "biases": lambda H, Tq, Tk: (
        {
            "a": normal(7, 2, 1, Tq, Tk),
            "b": normal(8, H, 1, Tk),
            "c": normal(9, H, Tq, 1),
            "tau": uniform(10, Tq, 1) + 0.5,
        },
        lambda a, b, c, tau: {"problem": Transport(prior=Bias(a) * Bias(b) * Bias(c), temperature=tau)},
    ),
    "sink": lambda H, Tq, Tk: (
        {"sink": normal(11, H), "tau": uniform(12, 1) + 0.5},
        lambda sink, tau: {"problem": Transport(prior=Causal(END), marginal=Rows(sink=sink), temperature=tau)},
    ),
    "sink, bias": lambda H, Tq, Tk: (
        {"sink": normal(11, H), "b": normal(8, H, 1, Tk)},
        lambda sink, b: {"problem": Transport(prior=Bias(b), marginal=Rows(sink=sink))},
    ),
    "relax": lambda H, Tq, Tk: (
        {"rho": uniform(13, H) + 1, "tau": uniform(14, H, 1, 1) + 0.5, "b": normal(15, Tk)},
        lambda rho, tau, b: {"problem": Transport(prior=Bias(b), marginal=Rows(relax=rho), temperature=tau)},
    ),
    "free": lambda H, Tq, Tk: (
        {"offset": normal(16, H) - math.log(Tk), "tau": uniform(17, 1) + 0.5},
        lambda offset, tau: {"problem": Transport(marginal=Free(offset=offset), temperature=tau)},
    ),
    "mass": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(marginal=Rows(mass=2.0))}),
    "softcap": lambda H, Tq, Tk: (
        {"slopes": uniform(18, H)},
        lambda slopes: {"softcap": 2.0, "problem": Transport(prior=ALiBi(slopes, alignment=END))},
    ),
}

SHAPES = [
    {"Tq": 2, "Tk": 2, "D": 1, "Dv": 1},
    {"Tq": 24, "Tk": 96, "D": 32, "Dv": 32},
    {"Tq": 53, "Tk": 53, "D": 17, "Dv": 9, "layout": "bthd"},
    {"Tq": 130, "Tk": 70, "D": 64, "Dv": 64, "layout": "cut", "Hkv": 4},
    {"Tq": 3, "Tk": 700, "D": 8, "Dv": 40, "layout": "bhdt"},
]


# --- Tsallis and Fermi-Dirac: the price is searched -------------------------------------------------------------------

each_isa = pytest.mark.parametrize("isa", ["each"], indirect=True)

# The orders 2 and 1.5 have their own kernels, and other numbers share one. Tensors differ by row and have a gradient.
# Orders near 1 are computed as a distance from KL; so is a whole tensor if one of its orders is near 1.
LINKS = {str(alpha): lambda H, alpha=alpha: ({}, lambda: Tsallis(alpha)) for alpha in (1.05, 1.3, 1.5, 1.8, 2.0, 2.5)}
LINKS |= {
    "per head": lambda H: ({"alpha": torch.linspace(1.3, 2.0, H)}, lambda alpha: Tsallis(alpha)),
    "per head, near 1": lambda H: ({"alpha": torch.linspace(1.1, 1.9, H)}, lambda alpha: Tsallis(alpha)),
    "fermi": lambda H: ({}, FermiDirac),
}


class Linked(Case):
    """A case with a regulariser other than KL. `check` compares each instruction set with one run of the definition."""

    differences = ("value_spread", "cost", "score_variance", "kl")
    many = 12  # they are measured from the best key, not from the mean, over a thousand keys and more

    def __init__(self, link, tensors, call, statistics=None, marginal=None, **fixed):
        own, regularizer = LINKS[link](tensors["q"].shape[1])
        names = tuple(own)

        def meant(given):  # Fermi-Dirac needs a free marginal: keep the parameter
            if marginal is not None or link != "fermi" or isinstance(given, Free):
                return marginal or given
            return Free(next((level for level in (given.sink, given.relax) if level is not None), -1.0))

        def made(**tensors):
            arguments = call(**{n: t for n, t in tensors.items() if n not in names})
            problem = arguments.get("problem") or Transport()
            own = regularizer(*(tensors[n] for n in names))
            return arguments | {
                "problem": dataclasses.replace(problem, regularizer=own, marginal=meant(problem.marginal))
            }

        super().__init__(tensors | own, made, statistics or tuple(n for n in NAMES if n != "lse"), **fixed)
        # For alpha >= 2 the weights y^(beta - 1) in the gradient do not vanish at the edge of the support. Above 2 they
        # grow without bound, and the gradient of the entropy contains log p. So the last bit of a score at the edge can
        # change the gradient by any amount, in the reference backend as well, but there at another key.
        self.jumps = link in ("2.0", "2.5", "per head")
        self.factor = 30 if self.jumps else FACTOR

    def check(self, gradients=True, support=True):
        truth, plain = self.run("torch", torch.float64, gradients), self.run("torch", gradients=gradients)
        for isa in engine.isas():
            engine.use(isa)
            found = self.run("native", gradients=gradients)
            # The last bit of the score decides whether a key at the edge of the support has weight.
            off, lost = ((x.pop("support").double() - truth["support"]).abs() for x in (found, dict(plain)))
            assert off.numel() == 0 or not support or off.max() <= 1 + 2 * lost.max(), ("support", off.max())
            if self.jumps and off.sum() + lost.sum() > 0:  # for alpha >= 2 the gradient jumps there
                found = {n: t for n, t in found.items() if not n.startswith("grad")}
            self.judge(found, truth, plain, self.factor)


MORE = {
    "causal, top left": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Causal("top_left"))}),
    "dense bias": lambda H, Tq, Tk: (
        {"b": normal(20, H, Tq, Tk).masked_fill(uniform(21, H, Tq, Tk) < 0.2, -math.inf)},
        lambda b: {"problem": Transport(prior=Bias(b))},
    ),
    "row bias": lambda H, Tq, Tk: ({"b": normal(22, H, Tq, 1)}, lambda b: {"problem": Transport(prior=Bias(b))}),
    "score bias": lambda H, Tq, Tk: (
        {"mask": torch.where(uniform(23, 2, 1, Tq, Tk) < 0.4, torch.finfo(torch.float32).min, normal(24, Tq, Tk))},
        lambda mask: {"attn_mask": mask},
    ),
    "key score": lambda H, Tq, Tk: ({"mask": normal(25, H, 1, Tk)}, lambda mask: {"attn_mask": mask}),
    "tau per query": lambda H, Tq, Tk: (
        {"tau": uniform(26, Tq, 1) + 0.3},
        lambda tau: {"problem": Transport(prior=Causal(END), temperature=tau)},
    ),
}
ALL = PROBLEMS | MORE


def spread(seed, factor, **shape):
    """Queries times a factor. The larger the factor, the fewer keys have weight."""
    tensors = qkv(seed, **shape)
    tensors["q"] = tensors["q"] * (factor if isinstance(factor, float) else factor[:, None])
    return tensors


def kept(monkeypatch):
    """A list that collects the key lists (csrc/engine/sparse_rows.h) that later forward passes store."""
    found, forward = [], BACKENDS["native"].forward

    def noted(form, names):
        results = forward(form, names)
        found.extend(results[name] for name in names if name == "lists")
        return results

    monkeypatch.setattr(BACKENDS["native"], "forward", noted)
    return found
