"""What each query sends and what each key receives, checked and made consistent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...backends import BACKENDS
from ...form import Form
from .views import one_sided, plan_only, transposed


@dataclass
class Groups:
    """The documents, each a transport problem of its own: which one each query and each key belongs to."""

    size: int
    queries: Tensor  # [B|1, 1, Tq]
    keys: Tensor  # [B|1, 1, Tk]

    @classmethod
    def of(cls, form: Form) -> Groups:
        _, _, Tq, Tk = form.shape
        assert form.query is not None
        device = form.query.device
        if form.query_ids is None or form.key_ids is None:
            one = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
            return cls(1, one.expand(1, 1, Tq), one.expand(1, 1, Tk))
        queries, keys = form.query_ids.squeeze(3), form.key_ids.squeeze(2)
        values, index = torch.unique(torch.cat([queries.flatten(), keys.flatten()]), return_inverse=True)
        n = queries.numel()
        return cls(max(1, len(values)), index[:n].view_as(queries), index[n:].view_as(keys))

    def total(self, x: Tensor, index: Tensor) -> Tensor:
        """The sum of x [B, H, T] over each document, [B, H, G]; `index` is `queries` or `keys`."""
        if self.size == 1:
            return x.sum(-1, keepdim=True)
        zeros = x.new_zeros(*x.shape[:-1], self.size)
        return zeros.scatter_add(-1, index.expand(x.shape), x)

    def each(self, total: Tensor, index: Tensor) -> Tensor:
        """A document's total [B, H, G], repeated for each of its members."""
        return total if self.size == 1 else total.gather(-1, index.expand(*total.shape[:-1], index.shape[-1]))


@dataclass
class Marginals:
    """What each query sends, what each key receives, and kappa = tau/rho. A query without admissible keys sends 0, and
    a key that is masked for every query receives 0."""

    row: Tensor  # a [B, H, Tq]
    column: Tensor  # b [B, H, Tk]
    kappa: Tensor  # [B|1, H|1, 1]
    groups: Groups
    complete: bool = False  # the caller gave no marginals, so every 0 follows from the prior

    @classmethod
    def of(cls, backend: str, form: Form) -> Marginals:
        """The marginals of a form. Differentiable in the given marginals, the temperature and rho."""
        B, H, Tq, Tk = form.shape
        assert form.query is not None
        device, groups = form.query.device, Groups.of(form)
        row: Tensor = torch.full((B, H, Tq), form.mass, dtype=form.dtype, device=device)
        if form.row_mass is not None:
            row = form.row_mass.squeeze(3).expand(B, H, Tq)
        keys = torch.ones(B, H, Tk, dtype=torch.bool, device=device)
        if form.has_prior:
            prior = one_sided(plan_only(form.detached()).without_scores())
            solver = BACKENDS[backend]
            # Not "> 0": a NaN in the prior makes the support NaN, which must not count as masked everywhere.
            row = torch.where(solver.forward(prior, ("support",))["support"] != 0, row, 0.0)
            readers = plan_only(transposed(prior))
            if form.row_mass is not None:  # a query that sends nothing reads nothing
                readers = one_sided(readers, torch.zeros_like(row), row.detach() > 0)
            keys = solver.forward(readers, ("support",))["support"] != 0
            if form.column_mass is not None:
                _check_outlets(solver, prior, row.detach() > 0, keys & (form.column_mass.squeeze(2) > 0))
        relaxed = isinstance(form.marginal_parameter, Tensor) or form.marginal_parameter > 0
        sent = groups.total(row, groups.queries)  # [B, H, G]
        if form.column_mass is None:
            count = groups.total(keys.to(form.dtype), groups.keys).clamp(min=1)
            column = torch.where(keys, groups.each(sent / count, groups.keys), 0.0)
        else:
            column = torch.where(keys, form.column_mass.squeeze(2).expand(B, H, Tk), 0.0)
            if not relaxed:  # totals agree only up to rounding: rescale the columns
                received = groups.total(column, groups.keys)
                unread = (form.column_mass.squeeze(2) * ~keys).detach()
                _check_totals(sent.detach(), received.detach(), unread, groups.size > 1)
                share = sent / torch.where(received > 0, received, 1.0)
                column = column * groups.each(share, groups.keys)
        kappa: Any = form.temperature / form.marginal_parameter if relaxed else 0.0
        if not isinstance(kappa, Tensor):
            kappa = torch.full((1, 1, 1, 1), kappa, dtype=form.dtype, device=device)
        complete = form.row_mass is None and form.column_mass is None
        return cls(row, column, kappa.squeeze(3), groups, complete)

    def detached(self) -> Marginals:
        """The marginals in float64 without a gradient, as the solver needs them."""
        row, column, kappa = (t.detach().double() for t in (self.row, self.column, self.kappa))
        groups = self.groups
        if self.balanced:  # make the totals equal to the last digit: no prices could remove a difference
            received = groups.total(column, groups.keys)
            share = groups.total(row, groups.queries) / torch.where(received > 0, received, 1.0)
            column = column * groups.each(share, groups.keys)
        return Marginals(row, column, kappa, self.groups, self.complete)

    @property
    def live(self) -> Tensor:
        return self.column > 0

    @property
    def balanced(self) -> bool:
        return not bool(self.kappa.any())

    def target(self, gamma: Tensor, kappa: Tensor | None = None) -> Tensor:
        """t = b exp(kappa gamma)."""
        return self.column * ((self.kappa if kappa is None else kappa) * gamma).exp()

    def centred(self, gamma: Tensor, weight: Tensor) -> Tensor:
        """gamma minus its weighted mean over each document. A price common to all keys of a document does not change
        the plan, because the document's rows have fixed masses."""
        groups = self.groups
        total = groups.total(weight, groups.keys)
        mean = groups.total(weight * gamma, groups.keys) / torch.where(total > 0, total, 1.0)
        return torch.where(self.live, gamma - groups.each(mean, groups.keys), 0.0)


def _check_totals(sent: Tensor, received: Tensor, unread: Tensor, documents: bool) -> None:
    off = (sent - received).abs() > 1e-3 * torch.maximum(sent, received)
    if bool(off.any()):
        where = " in a document" if documents else ""
        lost = int((unread > 0).any(0).any(0).sum())
        more = f"; {lost} keys that no query may read are to receive something, too" if lost else ""
        raise ValueError(
            f"RowsAndColumns(column): expected to sum to what the queries send{where}, {float(sent[off][0]):.6g}, "
            f"over the keys that can be read, got {float(received[off][0]):.6g}{more} (relax= allows unequal totals)"
        )


def _check_outlets(solver: Any, prior: Form, sends: Tensor, live: Tensor) -> None:
    """Raise if a query that sends mass may read no key that receives mass."""
    if bool(live.all()):
        return
    outlets = solver.forward(one_sided(prior, torch.zeros_like(live, dtype=prior.dtype), live), ("support",))["support"]
    stuck = sends & (outlets == 0)
    if bool(stuck.any()):
        b, h, i = (int(n) for n in stuck.nonzero()[0])
        raise ValueError(
            f"RowsAndColumns(column): expected every query that sends mass to be able to read a key that receives "
            f"mass, got {int(stuck.sum())} that cannot, the first of them query {i} of head {h} of batch {b}"
        )
