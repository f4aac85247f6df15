"""One two-sided problem at one temperature and in one precision: what a pair of passes computes for given prices.

At prices gamma (in units of tau) the rows are solved exactly, and the columns receive c:

    phi_i = lse_j(s_ij/tau + log pi_ij - gamma_j) - log a_i,      L_j = lse_i(s_ij/tau + log pi_ij - phi_i),
    c_j = exp(L_j - gamma_j),      which should be      t_j = b_j exp(kappa gamma_j),    kappa = tau/rho.

c - t is minus the gradient of the convex dual F(gamma) = sum_i a_i phi_i + sum_j b_j gamma_j (relaxed: see `_price`).
Its Hessian is M = diag(c + kappa t) - P' diag(1/a) P, a graph Laplacian over the keys (plus kappa t). A product with M
is one pass over the rows and one over the columns, with the vector as values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...backends import BACKENDS
from ...form import Form
from .marginals import Marginals
from .views import (
    heated,
    one_sided,
    own_head,
    per_head,
    plan_only,
    squared,
    transposed,
    with_prices_as_feature,
)

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class State:
    """The result of one pair of passes at the prices gamma, in float64."""

    gamma: Tensor  # [B, H, Tk]
    phi: Tensor  # [B, H, Tq]
    received: Tensor  # L [B, H, Tk]
    target: Tensor  # t [B, H, Tk]
    residual: Tensor  # c - t [B, H, Tk]
    share: Tensor  # [B, H], of the mass in a wrong column, in the worst document
    dual: Tensor  # F/tau [B, H]

    @property
    def size(self) -> Tensor:
        """The largest price of each head [B, H]. Rounding leaves a relative error of eps * size in c."""
        return torch.stack([t.abs().amax(-1) for t in (self.phi, self.received, self.gamma)]).amax(0)

    def blind(self, tolerance: float) -> Tensor:
        """Heads whose prices are so large that float64 cannot resolve the tolerance. Their share is meaningless."""
        return EPS * self.size > tolerance

    def where(self, condition: Tensor, other: State) -> State:
        """This state in heads [B, H] where the condition holds, the other state elsewhere."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return State(*(torch.where(condition[..., None] if a.dim() == 3 else condition, a, b) for a, b in pairs))


class Stage:
    """Passes over one problem, both ways, outside of autograd."""

    def __init__(self, backend: str, form: Form, marginals: Marginals, wide: bool, heat: Tensor | None = None) -> None:
        """`wide` computes in float64. `heat` [B, H, 1, 1] multiplies the temperature."""
        self.engine = BACKENDS[backend]
        self.marginals = marginals.detached()
        self.wide = wide or form.dtype == torch.float64
        form = form.detached()
        assert form.query is not None and form.key is not None
        form = plan_only(form.with_tensors({"query": form.query.to(form.dtype), "key": form.key.to(form.dtype)}))
        form = heated(form.widened() if wide else form, heat)
        self.form, self.turned = form, plan_only(transposed(form))
        self.kappa = self.marginals.kappa if heat is None else self.marginals.kappa * heat.squeeze(3)
        self.queries = self.marginals.row > 0
        self.as_feature = self.marginals.complete and form.softcap is None and form.scale != 0 and form.group <= 8

    def rows(self, gamma: Tensor) -> Form:
        """The rows at the keys' prices."""
        return self._priced(self.form, gamma, self.marginals.live)

    def columns(self, phi: Tensor) -> Form:
        """The columns at the queries' prices."""
        return self._priced(self.turned, phi, self.queries)

    def _priced(self, form: Form, prices: Tensor, live: Tensor) -> Form:
        return with_prices_as_feature(form, prices) if self.as_feature else one_sided(form, prices, live)

    def _lse(self, form: Form) -> Tensor:
        return self.engine.forward(form, ("lse",))["lse"].double()

    def at(self, gamma: Tensor, lse: Tensor | None = None) -> State:
        """The state at prices gamma, by both passes. If the rows' lse is given, the first pass is skipped."""
        marginals = self.marginals
        lse = self._lse(self.rows(gamma)) if lse is None else lse.double()
        phi = torch.where(self.queries, lse - marginals.row.log(), 0.0)
        received = torch.where(marginals.live, self._lse(self.columns(phi)), 0.0)
        target = marginals.target(gamma, self.kappa)
        residual = torch.where(marginals.live, (received - gamma).exp() - target, 0.0)
        dual = (marginals.row * phi).sum(-1) + self._price(gamma)
        return State(gamma, phi, received, target, residual, self.share(residual.abs()), dual)

    def share(self, residual: Tensor) -> Tensor:
        """The share of a document's mass in a wrong column, in the worst document: [B, H].

        Mass that is missing in one column is too much in another, so it is half of the sum of the residuals."""
        groups = self.marginals.groups
        off, due = groups.total(residual / 2, groups.keys), groups.total(self.marginals.column, groups.keys)
        return torch.where(due > 0, off / torch.where(due > 0, due, 1.0), 0.0).amax(-1)

    def _price(self, gamma: Tensor) -> Tensor:
        """The columns' part of the dual value, in units of tau."""
        relaxed = torch.expm1(self.kappa * gamma) / torch.where(self.kappa > 0, self.kappa, 1.0)
        return (self.marginals.column * torch.where(self.kappa > 0, relaxed, gamma)).sum(-1)

    def normalised(self, state: State) -> Tensor:
        """Sinkhorn's own step: the prices at which, with phi fixed, every column receives its target."""
        marginals = self.marginals
        gamma = (state.received - torch.where(marginals.live, marginals.column, 1.0).log()) / (1 + self.kappa)
        gamma = torch.where(marginals.live, gamma, 0.0)
        return self._shifted(gamma) if not marginals.balanced else gamma

    def _shifted(self, gamma: Tensor) -> Tensor:
        """Relaxed prices, shifted by one number per document so that the targets of its keys sum to what its queries
        send. In this direction alone Sinkhorn's own steps are slow if rho is large."""
        groups = self.marginals.groups
        target = groups.total(self.marginals.target(gamma, self.kappa), groups.keys)
        sent = groups.total(self.marginals.row, groups.queries)
        both = (target > 0) & (sent > 0)
        ratio = torch.where(both, sent, 1.0) / torch.where(both, target, 1.0)
        shift = ratio.log() / torch.where(self.kappa > 0, self.kappa, 1.0)
        return torch.where(self.marginals.live, gamma + groups.each(shift, groups.keys), 0.0)


@dataclass(frozen=True)
class Found:
    """The end of a method: the last state that it accepted, which heads [B, H] met the tolerance, and their
    iterations."""

    state: State
    arrived: Tensor
    iterations: Tensor  # pairs of passes
    coarse: bool = False  # float32 could not resolve the tolerance
    stuck: Tensor | None = None  # heads that stopped because the share no longer fell


@dataclass
class Solution:
    """An approximate solution of M x = rhs."""

    x: Tensor  # [B, H, Tk]
    products: Tensor  # [B, H], how many each head took
    off: Tensor  # [B, H], the relative residual that is left


class Laplacian:
    """M at one state, plus `damping` times diag(c). Linear systems are solved by conjugate gradients."""

    def __init__(self, stage: Stage, state: State, damping: Tensor | float = 0.0) -> None:
        marginals = stage.marginals
        self.engine, self.marginals = stage.engine, marginals
        self.rows, self.columns = stage.rows(state.gamma), stage.columns(state.phi)
        self.live = marginals.live
        self.received = torch.where(self.live, (state.received - state.gamma).exp(), 0.0)  # c
        self.diagonal = self.received * (1 + damping) + stage.kappa * torch.where(self.live, state.target, 0.0)
        # The diagonal of M: the weight that a key has in its own queries is subtracted. In sparse plans that is nearly
        # all of c, and without it the preconditioner would be far too large.
        twice = 2 * state.phi + torch.where(stage.queries, marginals.row, 1.0).log()
        loops = stage.engine.forward(stage._priced(squared(stage.turned), twice, stage.queries), ("lse",))["lse"]
        loops = torch.where(self.live, (loops.double() - 2 * state.gamma).exp(), 0.0)
        least = self.received * (1e-12 if stage.wide else 1e-5)  # rounding of the difference
        self.jacobi = torch.where(self.live, torch.maximum(self.diagonal - loops, least), 1.0)
        self.balanced = marginals.balanced

    def product(self, x: Tensor) -> Tensor:
        """M x, by two passes."""
        sent = self.engine.forward(dataclasses.replace(self.rows, value=per_head(self.rows, x)), ("out",))["out"]
        values = own_head(self.rows, sent)[..., None].to(self.columns.dtype)
        back = self.engine.forward(dataclasses.replace(self.columns, value=values), ("out",))["out"].squeeze(3)
        return torch.where(self.live, self.diagonal * x - self.received * back.double(), 0.0)

    def centred(self, x: Tensor) -> Tensor:
        """x without its mean over each document, which M maps to 0 (unless the columns are relaxed)."""
        return self.marginals.centred(x, self.received) if self.balanced else x

    def solve(
        self, rhs: Tensor, tolerance: Tensor | float, limit: Tensor | int, done: Tensor | None = None
    ) -> Solution:
        """Conjugate gradients, until the preconditioned residual has fallen to `tolerance` times its start, or for
        `limit` products. Both may be given for each head, [B, H]."""
        groups = self.marginals.groups
        r = torch.where(self.live, rhs.double(), 0.0)
        if self.balanced:  # project to M's range: the sum over each document is 0
            total = groups.total(self.received, groups.keys)
            excess = groups.total(r, groups.keys) / torch.where(total > 0, total, 1.0)
            r = r - self.received * groups.each(excess, groups.keys)
        x = torch.zeros_like(r)
        z = self.centred(r / self.jacobi)
        p, rz = z, (r * z).sum(-1, keepdim=True)
        first = rz.clone()
        going = torch.ones_like(rz, dtype=torch.bool) if done is None else ~done[..., None]
        products = torch.zeros(rz.shape[:2], dtype=torch.long, device=rz.device)
        square: Any = tolerance[..., None] ** 2 if isinstance(tolerance, Tensor) else tolerance**2
        for _ in range(int(torch.as_tensor(limit).max())):
            going = going & (rz > square * first) & (products < limit)[..., None]
            if not bool(going.any()):
                break
            q = self.product(p)
            products += going.squeeze(-1)
            curvature = (p * q).sum(-1, keepdim=True)
            going = going & (curvature > 0)
            if not bool(going.any()):
                break
            alpha = torch.where(going, rz / torch.where(curvature > 0, curvature, 1.0), 0.0)
            x, r = x + alpha * p, r - alpha * q
            z = self.centred(r / self.jacobi)
            following = (r * z).sum(-1, keepdim=True)
            p = torch.where(going, z + following / torch.where(rz > 0, rz, 1.0) * p, p)
            rz = torch.where(going, following, rz)
        off = (rz / torch.where(first > 0, first, 1.0)).clamp(min=0).sqrt().squeeze(-1)
        return Solution(self.centred(x), products, off)
