"""Random problems on a backend (the native engine) against the definition in float64: `make fuzz`, or

    python tests/support/fuzz.py [--minutes 5] [--seed 17 [--seed 18 ...]] [--backend triton]

With --backend triton the kernels are interpreted, unless PyTorch has a GPU.

The seed of a problem determines everything: regulariser, shapes (empty, one, odd), strides (transposed, cut,
expanded), how far the scores are spread, priors (products and unions), marginals, temperatures, dtypes, scores,
softcap, dropout, grouped heads, statistics, gradients. A failure prints the seed and how to run it again.
tests/backends/test_fuzz.py runs some fixed seeds.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor

import regard
from regard import (
    KL,
    ALiBi,
    AuxRequest,
    Bias,
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    Documents,
    FermiDirac,
    Free,
    LowRank,
    Prefix,
    Relative,
    Rows,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from regard.backends.reference import scores_of, solve_rows
from regard.counting import admissible_keys
from regard.form import Form
from regard.lowering import lower

from .divergences import Order

NAMES = regard.statistics.ROW_STATISTICS
OF_FAINT_ROWS = ("entropy", "kl", "score_variance", "dual")  # of weights as a distribution, or their price
SIZES = [0, 1, 1, 2, 3, 7, 8, 16, 23, 24, 25, 47, 48, 49, 96, 97, 130, 193]
DEPTHS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 40, 64, 65]
STRUCTURED = ["relative", "low rank", "decay", "density", "selected", "union", "union"]
PRIORS = ["causal", "window", "alibi", "documents", "bias", "row bias", "key bias"]


class Problem:
    """One random problem: leaves by name, and the call that uses them."""

    def __init__(self, seed: int) -> None:
        self.seed, self.r = seed, random.Random(seed)
        self.g = torch.Generator().manual_seed(seed)
        r = self.r
        self.B, self.Hkv = r.choice([1, 1, 2, 3]), r.choice([1, 1, 2, 3])
        self.H = self.Hkv * r.choice([1, 1, 2, 4])
        self.Tq, self.Tk = r.choice(SIZES), r.choice([*SIZES, 600])
        if r.random() < 0.4:
            self.Tk = self.Tq
        self.D, self.Dv = r.choice(DEPTHS), r.choice(DEPTHS)
        self.dtype = r.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16])
        self.leaves: dict[str, Tensor] = {
            "q": self.heads(self.H, self.Tq, self.D),
            "k": self.heads(self.Hkv, self.Tk, self.D),
            "v": self.heads(self.Hkv, self.Tk, self.Dv),
        }
        self.options: dict[str, Any] = {"enable_gqa": True}
        if r.random() < 0.2:
            self.options["softcap"] = r.choice([1.0, 5.0, 30.0])
        if r.random() < 0.2:
            self.options["dropout_p"] = r.choice([0.1, 0.5, 1.0])
        if r.random() < 0.2:
            self.options["scale"] = r.choice([-0.3, 0.0, 0.05, 1.0])
        self.mask = r.choice([None, None, None, "bool", "float", "row", "key"])
        if self.mask is not None:
            self.leaves["mask"] = self.make_mask()
        self.priors = r.sample(PRIORS, r.choice([0, 0, 1, 1, 2, 3]))
        self.alignment = r.choice(["top_left", "bottom_right"])
        self.band = (r.choice([None, 1, 3, 40]), r.choice([None, -1, 0, 2, 40]))
        for name in self.priors:
            self.add_prior(name)
        self.marginal = r.choice(["rows"] * 4 + ["mass", "sink", "relax", "free"])
        shape = r.choice([(1,), (self.H,)])
        if self.marginal == "sink":
            self.leaves["level"] = self.normal(*shape)
        elif self.marginal == "relax":
            self.leaves["level"] = self.uniform(*shape) + 0.7
        elif self.marginal == "free":
            self.leaves["level"] = self.normal(*shape) - math.log(max(self.Tk, 1))
        if r.random() < 0.3:
            shape = r.choice([(1,), (self.H, 1, 1), (self.Tq, 1), (self.B, 1, 1, 1)])
            self.leaves["tau"] = self.uniform(*shape) + 0.5
        self.statistics = tuple(r.sample(NAMES, r.choice([0, 0, 1, 3, len(NAMES)])))
        self.gradients = r.random() < 0.7
        self.family = r.choice(["kl", "tsallis", "tsallis", "fermi"])
        self.alpha = r.choice([1.05, 1.2, 1.3, 1.5, 1.5, 1.8, 2.0, 2.0, 2.5, None])  # None: a tensor
        self.spread = r.choice([0.01, 1.0, 1.0, 1.0, 4.0, 10.0])  # the larger, the fewer keys have weight
        if self.family != "kl":
            self.other_family()
        # The same problem with the regulariser written by hand, which is compiled. Near 1 its formulas lose digits.
        # Above 2 and with tiny priors, t = pi^(1 - alpha) is beyond float32.
        by_hand = random.Random(f"own {self.seed}").random() < 0.25
        self.own = by_hand and self.family == "tsallis" and 1.25 < (self.alpha or 1.5) <= 2
        self.structured()

    def structured(self) -> None:
        """Structured priors, a temperature by keys, another score: drawn from a generator of their own."""
        r = random.Random(f"structured {self.seed}")
        B, H, Tq, Tk = self.B, self.H, self.Tq, self.Tk
        self.union: Any = None
        self.block = r.choice([1, 1, 3, 32, 64])
        self.more = r.sample(STRUCTURED, r.choice([1, 1, 2, 3])) if r.random() < 0.5 else []
        for name in self.more:
            if name == "relative":
                self.leaves["table"] = self.normal(r.choice([1, H]), 2 * r.choice([0, 1, 5, 60]) + 1)
            elif name == "low rank":
                rank, shared = r.choice([1, 2, 5]), r.choice([1, H, self.Hkv])
                self.leaves["query_factor"] = self.normal(r.choice([1, B]), r.choice([1, H]), Tq, rank) / rank
                self.leaves["key_factor"] = self.normal(r.choice([1, B]), shared, Tk, rank)
            elif name == "decay":
                self.leaves["forget"] = -self.uniform(r.choice([1, B]), r.choice([1, H]), Tk) * r.choice([0.01, 1.0])
            elif name == "density":
                shape = r.choice([(Tq, Tk), (B, 1, Tq, Tk), (H, 1, Tk)])
                self.leaves["density"] = (self.uniform(*shape) - 0.1).clamp(min=0)
            elif name == "selected":
                self.leaves["index"] = self.indices(r, self.block)
            elif self.union is None:
                self.union = self.any_of(r)
        chance = random.Random(f"function {self.seed}")
        if chance.random() < 0.3:
            self.more.append("function")
            self.leaves["function slopes"] = self.uniform(H)
            self.leaves["function table"] = self.normal(H, 41) * chance.choice([0.1, 1.0])
            self.leaves["function keys"] = self.normal(B, max(1, Tk)) * 0.3
            self.function_masks = chance.random() < 0.5
        if "tau" not in self.leaves and r.random() < 0.25:
            self.leaves["slope"] = self.uniform(r.choice([1, H])) + 0.3
            if self.statistics or r.random() < 0.5:  # with an offset of 0, rows of one key are at a limit
                self.leaves["offset"] = self.uniform(r.choice([1, H])) + 0.5
            if r.random() < 0.5:
                self.leaves["power"] = self.uniform(r.choice([1, H])) + 0.5
        if r.random() < 0.15:
            self.options["score"] = r.choice(["cosine", "euclidean"])

    def function(self, x: dict[str, Tensor]) -> Any:
        """A function whose graph does not depend on the seed, but for a mask: it is compiled twice."""
        slopes, table, keys = x["function slopes"], x["function table"], x["function keys"]

        def log_prior(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            away = (i - j).abs()
            found = -0.01 * slopes[h] * away + table[h, away.clamp(max=40)] * 0.5 + torch.tanh(keys[b, j])
            return torch.where((i + 2 * j) % 5 > 0, found, -math.inf) if self.function_masks else found

        return regard.prior(log_prior, self.alignment)

    def indices(self, r: random.Random, block: int) -> Tensor:
        shape = (r.choice([1, self.B]), r.choice([1, self.H]), self.Tq, r.choice([1, 4, 20]))
        return torch.randint(-1, max(0, -(-self.Tk // block)), shape, generator=self.g)

    def any_of(self, r: random.Random) -> Any:
        """A union of masks and of products of masks."""
        B, H, Tq, Tk, at = self.B, self.H, self.Tq, self.Tk, self.alignment

        def ids(T: int) -> Tensor:
            return torch.randint(-1, 3, (r.choice([1, B]), T), generator=self.g).sort(1).values

        def blocks() -> Blocks:
            size = r.choice([1, 5, 16, 64, 100])
            shape = (r.choice([1, B]), r.choice([1, H]), -(-Tq // size), -(-Tk // size))
            return Blocks(self.uniform(*shape) < 0.3, size)

        def one() -> Any:
            block = r.choice([1, 3, 64])
            lengths = torch.randint(0, Tk + 2, (B,), generator=self.g)
            kinds = {
                "causal": lambda: Causal(at),
                "window": lambda: Window(r.choice([0, 2, 70]), r.choice([0, 1, 70]), alignment=at),
                "documents": lambda: Documents(ids(Tq), ids(Tk)),
                "prefix": lambda: Prefix(r.choice([0, 1, 9, 64, lengths])),
                "blocks": blocks,
                "selected": lambda: Selected(self.indices(r, block), block),
            }
            return kinds[r.choice(list(kinds))]()

        found = one()
        for _ in range(r.choice([1, 1, 2])):
            other = one() * one() if r.random() < 0.4 else one()
            found = found | other
        return found

    def other_family(self) -> None:
        r = self.r
        self.statistics = tuple(name for name in self.statistics if name != "lse")
        if r.random() < 0.3:  # enough keys for lists of those that have weight
            self.B, self.H, self.Hkv = 1, 2, r.choice([1, 2])
            self.Tq, self.Tk = r.choice([1, 5, 30]), r.choice([700, 900, 1300])
            self.priors, self.mask = [], None
            self.leaves = {n: t for n, t in self.leaves.items() if n in ("level",)}
            for name, H, T, D in (("q", self.H, self.Tq, self.D), ("k", self.Hkv, self.Tk, self.D)):
                self.leaves[name] = self.heads(H, T, D)
            self.leaves["v"] = self.heads(self.Hkv, self.Tk, self.Dv)
            if "level" in self.leaves:
                self.leaves["level"] = self.leaves["level"][:1]
            self.mask = random.Random(~self.seed).choice(
                [None, None, "row", "bool"]
            )  # rows without keys beside rows with lists
            if self.mask is not None:
                self.leaves["mask"] = self.make_mask()
        if self.marginal == "relax":  # the mass exp(dual/rho) easily becomes 0 or infinite near alpha = 1
            self.spread, self.alpha = min(self.spread, 1.0), max(self.alpha or 1.5, 1.3)
        self.leaves["q"] = self.leaves["q"] * self.spread
        if self.family == "fermi":
            self.marginal = "free"
            self.leaves["level"] = self.normal(1) - 1
            return
        if self.alpha is None:
            self.leaves["alpha"] = 1.1 + 0.8 * self.uniform(r.choice([1, self.H]))
        if self.marginal == "free":  # a score of 0 has weight 1 at the offset 1/(alpha - 1)
            self.leaves["level"] = 1 / ((self.alpha or 1.5) - 1) - self.uniform(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.g)

    def heads(self, H: int, T: int, D: int) -> Tensor:
        """[B, H, T, D] in a random memory layout."""
        B, layout = self.B, self.r.choice(["plain", "bthd", "bhdt", "cut", "every other", "expanded"])
        if layout == "plain":
            x = self.normal(B, H, T, D)
        elif layout == "bthd":
            x = self.normal(B, T, H, D).transpose(1, 2)
        elif layout == "bhdt":
            x = self.normal(B, H, D, T).transpose(2, 3)
        elif layout == "cut":
            x = self.normal(B, H, T, 3 * D + 1)[..., D : 2 * D]
        elif layout == "every other":
            x = self.normal(B, H, 2 * T, 2 * D)[:, :, ::2, ::2]
        else:
            x = self.normal(1, 1, T, D).expand(B, H, T, D)
        strides = x.stride()  # .to() would make a copy in another layout
        same = torch.empty_strided((B, H, T, D), strides, dtype=self.dtype) if layout != "plain" else x.to(self.dtype)
        if layout == "expanded":
            return x[:1, :1].to(self.dtype).expand(B, H, T, D)
        return same.copy_(x) if layout != "plain" else same

    def make_mask(self) -> Tensor:
        shape = {"row": (self.H, self.Tq, 1), "key": (self.B, 1, 1, self.Tk)}.get(
            str(self.mask),
            self.r.choice([(self.Tq, self.Tk), (self.B, 1, self.Tq, self.Tk), (self.H, self.Tq, self.Tk)]),
        )
        keep = self.uniform(*shape) > self.r.choice([0.0, 0.3, 0.95])
        if self.mask == "bool" or (self.mask in ("row", "key") and self.r.random() < 0.5):
            return keep
        return self.normal(*shape).masked_fill(~keep, -math.inf)

    def add_prior(self, name: str) -> None:
        B, H, Tq, Tk = self.B, self.H, self.Tq, self.Tk
        if name == "alibi":
            self.leaves["slopes"] = self.uniform(self.r.choice([1, H]))
        elif name == "documents":
            self.leaves["ids"] = torch.randint(-1, 3, (self.r.choice([1, B]), Tq), generator=self.g)
            self.leaves["key_ids"] = torch.randint(-1, 3, (self.r.choice([1, B]), Tk), generator=self.g)
        elif name == "bias":
            shape = self.r.choice([(Tq, Tk), (B, 1, Tq, Tk), (H, Tq, Tk)])
            self.leaves["bias"] = self.normal(*shape).masked_fill(self.uniform(*shape) < 0.2, -math.inf)
        elif name == "row bias":
            self.leaves["row"] = self.normal(H, Tq, 1)
        elif name == "key bias":
            self.leaves["key"] = self.normal(self.r.choice([1, H]), 1, Tk)

    def call(self, x: dict[str, Tensor]) -> dict[str, Any]:
        prior = None
        for name in dict.fromkeys(self.priors + self.more):
            factor = {
                "relative": lambda: Relative(x["table"], alignment=self.alignment),
                "low rank": lambda: LowRank(x["query_factor"], x["key_factor"]),
                "decay": lambda: Decay(x["forget"], alignment=self.alignment),
                "density": lambda: Density(x["density"]),
                "selected": lambda: Selected(x["index"], self.block),
                "union": lambda: self.union,
                "function": lambda: self.function(x),
                "causal": lambda: Causal(self.alignment),
                "window": lambda: Window(*self.band, alignment=self.alignment),
                "alibi": lambda: ALiBi(x["slopes"], alignment=self.alignment),
                "documents": lambda: Documents(x["ids"], x["key_ids"]),
                "bias": lambda: Bias(x["bias"]),
                "row bias": lambda: Bias(x["row"]),
                "key bias": lambda: Bias(x["key"]),
            }[name]()
            prior = factor if prior is None else prior * factor
        marginal = {
            "rows": lambda: Rows(),
            "mass": lambda: Rows(mass=2.0),
            "sink": lambda: Rows(sink=x["level"]),
            "relax": lambda: Rows(relax=x["level"]),
            "free": lambda: Free(offset=x["level"]),
        }[self.marginal]()
        regularizer = {
            "kl": KL,
            "fermi": FermiDirac,
            "tsallis": lambda: (Order if self.own else Tsallis)(x["alpha"] if self.alpha is None else self.alpha),
        }[self.family]()
        temperature: Any = x.get("tau", 1.0)
        if "slope" in x:
            temperature = ByKeys(x["slope"], x.get("offset", 0.0), x.get("power", 1.0))
        return self.options | {
            "problem": Transport(regularizer, prior=prior, marginal=marginal, temperature=temperature),
            "attn_mask": x.get("mask"),
        }

    def run(self, backend: str, dtype: torch.dtype | None, faint: Tensor | bool = False) -> dict[str, Tensor]:
        """Outputs and gradients by name; in `dtype` instead of the problem's own if it is given. lse and entropy of
        `faint` rows are not differentiated."""
        leaves = {}
        for name, leaf in self.leaves.items():
            floating = leaf.is_floating_point()
            leaves[name] = leaf.detach().to(dtype) if floating and dtype is not None else leaf.detach()
            if floating and self.gradients:
                leaves[name].requires_grad_()
        torch.manual_seed(self.seed)  # dropout
        request = AuxRequest(**dict.fromkeys(self.statistics, True))
        out, aux = regard.attention(
            leaves["q"], leaves["k"], leaves["v"], **self.call(leaves), return_aux=request, backend=backend
        )
        results = {"out": out} | {name: getattr(aux, name) for name in self.statistics}
        if self.gradients:
            loss = 0.0
            for name, weight in self.incoming(results, faint).items():
                loss = loss + (results[name].masked_fill(results[name].isinf(), 0.0) * weight).sum()
            learned = {n: t for n, t in leaves.items() if t.requires_grad}
            found = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)  # type: ignore[arg-type]
            results |= {
                f"grad {n}": torch.zeros_like(t) if f is None else f
                for (n, t), f in zip(learned.items(), found, strict=True)
            }
        return {name: t.detach() for name, t in results.items()}

    def incoming(self, results: dict[str, Tensor], faint: Tensor | bool) -> dict[str, Tensor]:
        """The gradients of the loss in the outputs."""
        g, weights = torch.Generator().manual_seed(7), {}
        for name in ("out", *(n for n in ("lse", "entropy") if n in results)):
            weights[name] = torch.randn(results[name].shape, generator=g).to(results[name].dtype)
            if name in ("lse", "entropy"):
                weights[name] = torch.where(torch.as_tensor(faint), 0.0, weights[name])
        return weights

    def exactly(self, **changed: Tensor) -> Form:
        """The problem in float64 and normal form."""
        leaves = {n: t.detach().double() if t.is_floating_point() else t for n, t in self.leaves.items()} | changed
        torch.manual_seed(self.seed)  # dropout
        return lower(leaves["q"], leaves["k"], leaves["v"], **self.call(leaves))

    def faint(self) -> Tensor | bool:
        """Rows [B, H, Tq] whose mass is so small that the dtype cannot represent single weights accurately."""
        if self.marginal not in ("relax", "free") or 0 in (self.B, self.H, self.Tq, self.Tk):
            return False
        form = self.exactly()
        mass = solve_rows(form, scores_of(form)[0]).weights.sum(-1)
        kind = torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32)
        return (mass > 0) & (mass < kind.tiny / kind.eps)

    def sizes(self, truth: dict[str, Tensor], faint: Tensor | bool) -> dict[str, float]:
        """The sum of the absolute terms of each gradient, to which its rounding error is proportional.

        A pair adds w/tau (u - b) to the gradient of its score and p (u - b) to that of its log-prior. Here u is
        replaced by the sum of the absolute terms of u, and -b by their mean.
        """
        leaves = {n: self.leaves[n].detach().double().abs().requires_grad_() for n in ("q", "k")}
        for name in ("mask", "slopes", "bias", "row", "key", "table"):
            if name in self.leaves and self.leaves[name].is_floating_point():
                leaves[name] = self.leaves[name].detach().double().requires_grad_()
        for name in ("query_factor", "key_factor"):
            if name in self.leaves:
                leaves[name] = self.leaves[name].detach().double().abs().requires_grad_()
        form = self.exactly()
        scores, values = scores_of(form)
        rows, incoming = solve_rows(form, scores, rates=True), self.incoming(truth, faint)
        heads = self.H // self.Hkv
        u = incoming["out"].double().abs() @ values.abs().repeat_interleave(heads, 1).mT
        if form.dropout_key is not None:
            u = u * form.kept(self.Tq, self.Tk, u.device)
        p, w = rows.weights, rows.rates
        assert w is not None
        mass = (p.sum(-1, keepdim=True) + (0.0 if rows.null is None else rows.null)).clamp(min=1e-300)
        if "lse" in incoming:
            u = u + incoming["lse"].double().abs()[..., None] / mass
        if "entropy" in incoming:
            information = torch.where(p > 0, (p / mass).clamp(min=1e-300).log().abs(), 0.0)
            entropy = (p * information).sum(-1, keepdim=True) / mass
            u = u + incoming["entropy"].double().abs()[..., None] / mass * (information + entropy)
        if rows.slack is not None:
            u = u + (w * u).sum(-1, keepdim=True) / (w.sum(-1, keepdim=True) + rows.slack).clamp(min=1e-300)
        options, self.options = self.options, {n: o for n, o in self.options.items() if n != "softcap"}
        bare = self.exactly(**leaves)  # without softcap, whose slope is at most 1
        self.options = options
        log_prior = bare.log_prior(self.Tq, self.Tk, u.dtype, u.device, with_density=False)
        total = (w * u * scores_of(bare)[0]).sum() + (0.0 if log_prior is None else (p * u * log_prior).sum())
        by_unit: dict[str, Tensor] = {}
        if self.options.get("score") == "cosine" and total.requires_grad:
            # The gradient of x/|x| is the part of g/|x| across x. The part along x cancels, and its rounding stays.
            vectors = {"q": bare.query, "k": bare.key}
            grads = torch.autograd.grad(total, [x for x in vectors.values() if x is not None], retain_graph=True)
            by_unit = {
                n: g / leaves[n].detach().norm(dim=-1, keepdim=True) for n, g in zip(vectors, grads, strict=True)
            }
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        sizes = {
            n: 0.0 if g is None or not g.numel() else float(g.abs().max()) for n, g in zip(leaves, found, strict=True)
        }
        sizes |= {n: max(sizes[n], float(g.abs().max())) for n, g in by_unit.items() if g.numel()}
        if "level" in self.leaves:  # in relaxed rows the price is a factor, too
            by_level = (w * u).sum(-1, keepdim=True)
            if self.marginal == "relax":
                by_level = by_level * torch.where(by_level > 0, rows.dual.abs() / form.marginal_parameter, 0.0)
            sizes["level"] = float(by_level.sum())
        if "alpha" in self.leaves:  # beta^2 (1 - 1/y - log y), y = (p/pi)^(alpha - 1)
            power = form.parameters[0] - 1
            log_y = power * (p.clamp(min=1e-300).log() - (0.0 if rows.log_prior is None else rows.log_prior))
            by_alpha = p * u / power**2 * (1 + (-log_y).exp() + log_y.abs())
            sizes["alpha"] = float(torch.where(p > 0, by_alpha, 0.0).sum())
        if "forget" in self.leaves:  # a cumulative sum over all pairs
            sizes["forget"] = float((p * u).sum())
        if form.density is not None:
            by_density = (p / form.density.clamp(min=1e-3) * u).sum_to_size(form.density.shape)
            sizes["density"] = float(by_density.max()) if by_density.numel() else 0.0
        away = torch.where(w > 0, (rows.scores - rows.dual).abs() / rows.temperature, 0.0)
        by_tau = (w * u * away).sum(-1, keepdim=True)
        if "tau" in self.leaves:
            sizes["tau"] = float(by_tau.sum_to_size(self.leaves["tau"].shape).max())
        if "slope" in self.leaves:
            rule = {
                n: self.leaves[n].double().requires_grad_() for n in ("slope", "offset", "power") if n in self.leaves
            }
            log_count = admissible_keys(self.exactly()).clamp(min=1).double().log()
            slope, offset, power = (
                rule[n].view(1, -1, 1, 1) if n in rule else default
                for n, default in (("slope", 0.0), ("offset", 0.0), ("power", 1.0))
            )
            several = log_count > 0
            powered = torch.where(several, torch.where(several, log_count, 1.0) ** power, 0.0)
            ruled = 1 / (offset + slope * powered).clamp(min=1e-24)
            found = torch.autograd.grad((by_tau * ruled).sum(), list(rule.values()), allow_unused=True)
            sizes |= {n: 0.0 if g is None else float(g.abs().sum()) for n, g in zip(rule, found, strict=True)}
        return sizes

    def describe(self) -> str:
        leaves = ", ".join(f"{n}{list(t.shape)}" for n, t in self.leaves.items())
        return (
            f"seed {self.seed}: {self.family}{' by hand' * self.own} "
            f"{self.alpha} x {self.spread}, {self.dtype}, {leaves}; "
            f"priors {self.priors} {self.more} {self.alignment} {self.band}, block {self.block}, {self.union!r}, "
            f"marginal {self.marginal}, mask {self.mask}, {self.options}, statistics {self.statistics}, "
            f"gradients {self.gradients}"
        )


def error(found: Tensor, truth: Tensor, share: float = 1.0) -> float:
    """Largest error (among a share of the entries), relative to 1 and to the largest entry. Equal infinities and NaN do
    not count."""
    if not found.numel():
        return 0.0
    found, truth = found.double(), truth.double()
    same = (found == truth) | (found.isnan() & truth.isnan())
    gap = torch.where(same, 0.0, (found - truth).abs()).nan_to_num(nan=math.inf)
    size = torch.where(truth.isfinite(), truth.abs(), 0.0)
    ordered = (gap / (1 + size.max())).flatten().sort().values
    return float(ordered[max(0, math.ceil(share * ordered.numel()) - 1)])


def served(problem: Problem, backend: str = "native") -> bool:
    try:
        regard.select_backend(
            *(problem.leaves[n] for n in "qkv"),
            **problem.call(problem.leaves),
            return_aux=AuxRequest(**dict.fromkeys(problem.statistics, True)),
            backend=backend,
        )
    except NotImplementedError:
        return False
    return True


def check(seed: int, backend: str = "native") -> str | None:
    """None, or a description of the error. The tolerance is a multiple of the reference backend's error in the same
    dtype."""
    problem = Problem(seed)
    try:
        if not served(problem, backend):
            return None  # the backend declines it
        faint = problem.faint()
        found = problem.run(backend, None, faint)
        truth = problem.run("torch", torch.float64, faint)
        plain = problem.run("torch", None, faint)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    half = problem.dtype in (torch.bfloat16, torch.float16)
    # In relaxed and free rows the mass is an exponential of the scores, and so is its rounding error.
    floor = 1e-12 if problem.dtype == torch.float64 else 2e-5
    eps = torch.finfo(torch.float64 if problem.dtype == torch.float64 else torch.float32).eps
    sizes: dict[str, float] | None = None
    for name, value in found.items():
        if value.shape != truth[name].shape:
            return f"{name}: shape {list(value.shape)}, expected {list(truth[name].shape)}"
        rounded = half and (name == "out" or name in ("grad q", "grad k", "grad v"))
        share, expected = 1.0, truth[name].double()
        aside = expected.isfinite() & ~plain[name].isfinite()  # beyond the range of the dtype
        if name in OF_FAINT_ROWS:
            aside = aside | torch.as_tensor(faint)
        if name == "grad density" and "entropy" in found:
            aside = aside | (problem.leaves["density"] == 0)  # there the derivative of p log p is infinite
        value, definition = (torch.where(aside, expected, t.double()) for t in (value, plain[name]))
        bound = 4 * error(definition, expected) + (torch.finfo(problem.dtype).eps if rounded else floor)
        if problem.Tk > 512 and name in ("score_variance", "cost", "kl", "value_spread"):
            bound = bound + 5 * floor  # differences of sums over many keys
        if problem.options.get("score") == "euclidean":
            bound = 4 * bound  # sums of squares are larger than dot products
        if problem.family == "tsallis":
            # Near alpha = 1 a weight is a high power of y, which multiplies the rounding error of y. The last bit of a
            # score decides whether a key at the edge of the support has weight. Above alpha = 2 such a weight is a low
            # power of the rounding error, and for alpha >= 2 gradients jump. Then most gradients must be right and all
            # must be finite.
            power = 0.5 if problem.alpha is None else problem.alpha - 1
            bound = bound + floor / (power if problem.alpha else 1.0) + (8 * eps ** (1 / power) if power > 1 else 0.0)
            fine = problem.dtype == torch.float64  # no score is that close to the edge
            if name == "support" and not fine:
                bound, share = bound + 0.02, 0.98
            elif name.startswith("grad") and (problem.alpha or 1.5) >= 2:
                bound, share = 10 * bound, 1.0 if fine else 0.8
                if not value[expected.isfinite()].isfinite().all():
                    return f"{name}: not finite"
            elif name.startswith("grad") and power >= 0.5:
                bound = 3 * bound  # w is a low power of the rounding error, too
        wrong = error(value, expected, share)
        if not wrong <= bound and name.startswith("grad"):
            # Where terms cancel, the sum is small, but the rounding errors of the terms are not.
            sizes = problem.sizes(truth, faint) if sizes is None else sizes
            bound += 8 * eps * sizes.get(name.removeprefix("grad "), 0.0) / (1 + float(expected.abs().max()))
        if not wrong <= bound:
            return f"{name}: error {wrong:.1e}, expected at most {bound:.1e}"
    return None


def report(seed: int, wrong: str, backend: str = "native") -> str:
    again = f"python tests/support/fuzz.py --backend {backend} --seed {seed}"
    return f"{wrong}\n  {Problem(seed).describe()}\n  again: {again}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, action="append", help="only these")
    parser.add_argument("--backend", default="native", help="native or triton")
    options = parser.parse_args()
    if options.backend == "triton" and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    first = random.SystemRandom().randrange(2**31)
    end, tried, declined, failed = time.monotonic() + 60 * options.minutes, 0, 0, 0
    if not options.seed:
        print(f"seeds from {first} for {options.minutes:g} minutes", flush=True)
    seeds = iter(options.seed) if options.seed else iter(range(first, first + 2**31))
    try:
        for seed in seeds:
            if not options.seed and time.monotonic() > end:
                break
            if not served(Problem(seed), options.backend):
                declined += 1
                continue
            tried += 1
            if wrong := check(seed, options.backend):
                failed += 1
                print(f"FAILED: {report(seed, wrong, options.backend)}", flush=True)
    except KeyboardInterrupt:
        pass
    print(f"{tried} problems, {failed} failures ({declined} more that the backend declines)")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
