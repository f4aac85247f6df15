"""Rows and columns (`RowsAndColumns`): the keys' prices, found by passes of any backend over the one-sided problem.

With prices g of the keys the plan is p_ij = pi_ij exp((s_ij - f_i - g_j)/tau). Given gamma = g/tau, exp(-gamma) is one
more prior over the keys and the rows are attention's own: phi = f/tau = lse - log a. Given phi, the columns are the
same problem with queries and keys exchanged. So Sinkhorn's iteration is two lse passes, and nothing is ever Tq x Tk:

    phi_i = lse_j(s_ij/tau + log pi_ij - gamma_j) - log a_i,        L_j = lse_i(s_ij/tau + log pi_ij - phi_i),
    gamma_j <- (L_j - log b_j) / (1 + kappa),                       kappa = tau/rho (0: no relaxation).

It is a fixed point iteration that Anderson's mixing speeds up; a step after which neither the residual nor the dual
value (which plain steps always lower) is better is taken back. Small temperatures are approached from larger ones.

The gradient is the implicit function's. What column j receives, c_j = exp(L_j - gamma_j), must be t_j = b_j exp(kappa
gamma_j), and with the rows eliminated d(t - c)/d gamma is the symmetric M = diag(c + kappa t) - P' diag(1/a) P. From
dL/dgamma conjugate gradients find x = M^-1 dL/dgamma with two passes a step (the values are x), and then

    dL/dtheta += d/dtheta sum_j x_j (c_j - t_j)    at fixed gamma,

which is one more backward pass of the one-sided problem with the values x.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ops
from .form import Form
from .problem import RowsAndColumns
from .statistics import DIFFERENTIABLE

_MEMORY = 20  # steps that Anderson's mixing looks back on
_FACTOR = 3.0  # from one temperature to the next on the way down
_WARM = 0.03  # the residual that is good enough on the way
_PATIENCE = 50  # iterations in float32 that do not halve a residual are enough of it
_STILL = 200  # iterations that do not bring a residual down by a hundredth (or a fourth of all allowed) are the last
_TOLERANCE = RowsAndColumns.tolerance  # the default: a caller who tolerates more has the gradient solved to a tenth of
_COARSEST = 1e-3  # that, but no worse than this
_PEAKED = 0.5  # of log n: plans of less entropy are approached from larger temperatures
NEEDED = ("lse", "entropy", "support")  # the statistics that the solver's own passes ask of a backend


# --- one-sided views --------------------------------------------------------------------------------------------------


def one_sided(form: Form, gamma: Tensor | None = None, live: Tensor | None = None) -> Form:
    """The rows of the plan, given prices gamma [B, H, Tk] of the keys (those that are not live: infinite)."""
    log_priors = form.log_priors
    if gamma is not None and live is not None:
        bias = torch.where(live, -gamma.to(form.dtype), -math.inf)
        log_priors = [*log_priors, bias[:, :, None]]
    return dataclasses.replace(form, marginal="rows", level=0.0, row_mass=None, column_mass=None, log_priors=log_priors)


def transposed(form: Form) -> Form:
    """The plan with queries and keys exchanged: views, but for keys that query heads share."""
    query, key = form.query, form.key
    assert query is not None and key is not None

    def turned(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.mT

    return dataclasses.replace(
        form,
        query=key if form.group == 1 else key.repeat_interleave(form.group, 1),
        key=query,
        value=query[..., :0],
        score_bias=turned(form.score_bias),
        mask=turned(form.mask),
        log_priors=[t.mT for t in form.log_priors],
        query_ids=turned(form.key_ids),
        key_ids=turned(form.query_ids),
        left=form.right,
        right=form.left,
        offset=-form.offset,
        row_mass=turned(form.column_mass),
        column_mass=turned(form.row_mass),
    )


def _bare(form: Form) -> Form:
    """The plan alone: no values, no dropout."""
    assert form.key is not None
    return dataclasses.replace(form, value=form.key[..., :0], mass=1.0, dropout_p=0.0, dropout_key=None)


def widened(form: Form) -> Form:
    """The same in float64; masks, float masks and log-priors are read in any dtype."""
    if form.dtype == torch.float64:
        return form
    slots = ("query", "key", "value", "slopes", "temperature", "level")
    return form.with_tensors({n: t.double() for n, t in form.tensors().items() if n in slots})


def per_head(form: Form, x: Tensor) -> Tensor:
    """Numbers of each key for each query head [B, H, Tk] as values [B, Hkv, Tk, group]."""
    B, H, Tk = x.shape
    return x.view(B, H // form.group, form.group, Tk).mT.to(form.dtype)


def own_head(form: Form, out: Tensor) -> Tensor:
    """Of each output [B, H, Tq, group] of such values the head's own: [B, H, Tq]."""
    B, H, Tq, group = out.shape
    return out.view(B, H // group, group, Tq, group).diagonal(dim1=2, dim2=4).mT.reshape(B, H, Tq)


def _folded(form: Form, prices: Tensor) -> Form:
    """The rows at these prices [B, H, Tk] in units of tau, as one more feature of queries and keys (one for each head
    that shares a key): as exact as a log-prior and a third faster on the native engine."""
    query, key = form.query, form.key
    assert query is not None and key is not None
    tau: Any = form.temperature.squeeze(3) if isinstance(form.temperature, Tensor) else form.temperature
    features = per_head(form, -prices * (tau / form.scale))  # [B, Hkv, Tk, group]
    own = torch.eye(form.group, dtype=query.dtype, device=query.device).repeat(key.shape[1], 1)  # [H, group]
    own = own[:, None].expand(*query.shape[:3], form.group)
    form = dataclasses.replace(form, query=torch.cat([query, own], -1), key=torch.cat([key, features], -1))
    return one_sided(form)


# --- the marginals ----------------------------------------------------------------------------------------------------


@dataclass
class Groups:
    """Documents: each is a transport problem of its own. Sums over the queries or keys of each, [B, H, G]."""

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
        _, index = torch.unique(torch.cat([queries.flatten(), keys.flatten()]), return_inverse=True)
        n = queries.numel()
        return cls(int(index.max()) + 1, index[:n].view_as(queries), index[n:].view_as(keys))

    def total(self, x: Tensor, index: Tensor) -> Tensor:
        if self.size == 1:
            return x.sum(-1, keepdim=True)
        zeros = x.new_zeros(*x.shape[:-1], self.size)
        return zeros.scatter_add(-1, index.expand(x.shape), x)

    def each(self, total: Tensor, index: Tensor) -> Tensor:
        """A total, at each of its members."""
        return total if self.size == 1 else total.gather(-1, index.expand(*total.shape[:-1], index.shape[-1]))


@dataclass
class Marginals:
    """What each query ships, what each key receives and tau/rho; 0 for queries and keys without a counterpart."""

    row: Tensor  # a [B, H, Tq]
    column: Tensor  # b [B, H, Tk]
    kappa: Tensor  # [B|1, H|1, 1]
    groups: Groups
    complete: bool = False  # a 0 is only where the prior makes it so

    @classmethod
    def of(cls, backend: str, form: Form) -> Marginals:
        """Differentiable in the marginals given, the temperature and rho."""
        B, H, Tq, Tk = form.shape
        assert form.query is not None
        device, groups = form.query.device, Groups.of(form)
        row: Tensor = torch.full((B, H, Tq), form.mass, dtype=form.dtype, device=device)
        if form.row_mass is not None:
            row = form.row_mass.squeeze(3).expand(B, H, Tq)
        keys = torch.ones(B, H, Tk, dtype=torch.bool, device=device)
        pieces = (form.mask, form.query_ids, form.left, form.right, form.score_bias, *form.log_priors)
        if any(piece is not None for piece in pieces):
            bare = one_sided(
                _bare(form.with_tensors({n: t.detach() for n, t in form.tensors().items()})).without_scores()
            )
            solver = ops.BACKENDS[backend]
            row = torch.where(solver.forward(bare, ("support",))["support"] > 0, row, 0.0)
            readers = _bare(transposed(bare))
            if form.row_mass is not None:  # a query that ships nothing reads nothing
                readers = one_sided(readers, torch.zeros_like(row), row.detach() > 0)
            keys = solver.forward(readers, ("support",))["support"] > 0
            if form.column_mass is not None:
                _check_outlets(solver, bare, row.detach() > 0, keys & (form.column_mass.squeeze(2) > 0))
        relaxed = isinstance(form.level, Tensor) or form.level > 0
        shipped = groups.total(row, groups.queries)  # [B, H, G]
        if form.column_mass is None:
            count = groups.total(keys.to(form.dtype), groups.keys).clamp(min=1)
            column = torch.where(keys, groups.each(shipped / count, groups.keys), 0.0)
        else:
            column = torch.where(keys, form.column_mass.squeeze(2).expand(B, H, Tk), 0.0)
            if not relaxed:  # two totals are never equal to the last digit: the columns follow the rows
                received = groups.total(column, groups.keys)
                unread = (form.column_mass.squeeze(2) * ~keys).detach()
                _check_totals(shipped.detach(), received.detach(), unread, groups.size > 1)
                share = shipped / torch.where(received > 0, received, 1.0)
                column = column * groups.each(share, groups.keys)
        kappa: Any = form.temperature / form.level if relaxed else 0.0
        if not isinstance(kappa, Tensor):
            kappa = torch.full((1, 1, 1, 1), kappa, dtype=form.dtype, device=device)
        complete = form.row_mass is None and form.column_mass is None
        return cls(row, column, kappa.squeeze(3), groups, complete)

    def detached(self) -> Marginals:
        """In float64, without a gradient: what the solver works on."""
        row, column, kappa = (t.detach().double() for t in (self.row, self.column, self.kappa))
        groups = self.groups
        if self.balanced:  # totals that differ by a rounding could not be met to more
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

    def level(self, gamma: Tensor, weight: Tensor) -> Tensor:
        """gamma less its weighted mean over each document: what a common price of all its keys takes from the rows."""
        groups = self.groups
        total = groups.total(weight, groups.keys)
        mean = groups.total(weight * gamma, groups.keys) / torch.where(total > 0, total, 1.0)
        return torch.where(self.live, gamma - groups.each(mean, groups.keys), 0.0)


def from_scores(form: Form, scores: Tensor) -> Form:
    """A problem whose scores [B, H, Tq, Tk] are at hand, as one of queries and keys without features."""
    B, H, Tq, Tk = scores.shape
    query, key = scores.new_empty(B, H, Tq, 0), scores.new_empty(B, H, Tk, 0)
    return dataclasses.replace(form, query=query, key=key, value=key, score_bias=scores)


def _check_totals(shipped: Tensor, received: Tensor, unread: Tensor, documents: bool) -> None:
    off = (shipped - received).abs() > 1e-3 * torch.maximum(shipped, received)
    if bool(off.any()):
        where = " in a document" if documents else ""
        lost = int((unread > 0).any(0).any(0).sum())
        more = f"; {lost} keys that no query may read are to receive something, too" if lost else ""
        raise ValueError(
            f"RowsAndColumns(column): expected to sum to what the queries ship{where}, {float(shipped[off][0]):.6g}, "
            f"over the keys that can be read, got {float(received[off][0]):.6g}{more} (relax= takes unequal totals)"
        )


def _check_outlets(solver: Any, bare: Form, ships: Tensor, live: Tensor) -> None:
    """See that each query that ships something may read a key that is to receive something."""
    if bool(live.all()):
        return
    outlets = solver.forward(one_sided(bare, torch.zeros_like(live, dtype=bare.dtype), live), ("support",))["support"]
    stuck = ships & (outlets == 0)
    if bool(stuck.any()):
        b, h, i = (int(n) for n in stuck.nonzero()[0])
        raise ValueError(
            f"RowsAndColumns(column): expected every query that ships something to be able to read a key that is to "
            f"receive some, got {int(stuck.sum())} that cannot, the first of them query {i} of head {h} of batch {b}"
        )


# --- the solver -------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The keys' prices, how far from their marginals they leave the columns, and what it took."""

    gamma: Tensor  # [B, H, Tk], float64
    residual: Tensor  # |c - t| [B, H, Tk]
    share: Tensor  # [B, H], the worst document's sum of it, of what its keys are to receive
    iterations: Tensor  # [B, H]
    wide: bool  # the passes had to be in float64
    still: Tensor | None = None  # [B, H], given up: many iterations brought nothing
    proof: str = ""  # why there is no plan, where that was shown


class Solver:
    """Passes over one problem, both ways, in its own precision or in float64; nothing is recorded for a gradient."""

    def __init__(self, backend: str, form: Form, marginals: Marginals) -> None:
        self.engine = ops.BACKENDS[backend]
        self.marginals = marginals.detached()
        form = form.with_tensors({n: t.detach() for n, t in form.tensors().items()})
        assert form.query is not None and form.key is not None
        self.form = _bare(form.with_tensors({"query": form.query.to(form.dtype), "key": form.key.to(form.dtype)}))
        self.folds = self.marginals.complete and form.softcap is None and form.scale != 0 and form.group <= 8
        self.sides: dict[bool, tuple[Form, Form]] = {}
        self.queries = self.marginals.row > 0
        # Heads that were shown to have no plan. Without zeros of the prior within a document there always is one.
        self.impossible = torch.zeros(form.shape[:2], dtype=torch.bool, device=form.query.device)
        self.proof = ""
        pieces = (form.mask, form.left, form.right, form.score_bias, *form.log_priors)
        self.doubtful = self.marginals.balanced and any(piece is not None for piece in pieces)

    def side(self, wide: bool) -> tuple[Form, Form]:
        if wide not in self.sides:
            form = widened(self.form) if wide else self.form
            self.sides[wide] = form, _bare(transposed(form))
        return self.sides[wide]

    def rows(self, gamma: Tensor, wide: bool, heat: Tensor | None = None) -> Form:
        form = _heated(self.side(wide)[0], heat)
        return _folded(form, gamma) if self.folds else one_sided(form, gamma, self.marginals.live)

    def columns(self, phi: Tensor, wide: bool, heat: Tensor | None = None) -> Form:
        form = _heated(self.side(wide)[1], heat)
        return _folded(form, phi) if self.folds else one_sided(form, phi, self.queries)

    def sweep(
        self, gamma: Tensor, wide: bool, heat: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """phi [B, H, Tq] and L [B, H, Tk]; 0 where there is none. A known lse of the rows saves a pass."""
        if lse is None:
            lse = self.engine.forward(self.rows(gamma, wide, heat), ("lse",))["lse"]
        assert lse is not None
        lse = lse.double()
        phi = torch.where(self.queries, lse - self.marginals.row.log(), 0.0)
        received = self.engine.forward(self.columns(phi, wide, heat), ("lse",))["lse"].double()
        return phi, torch.where(self.marginals.live, received, 0.0)

    # Iterations

    def solve(self, settings: RowsAndColumns) -> Found:
        B, H, _, Tk = self.form.shape
        gamma = self.marginals.column.new_zeros(B, H, Tk)
        counted = torch.zeros(B, H, dtype=torch.long, device=gamma.device)
        if 0 in self.form.shape:
            return Found(gamma, gamma, gamma.sum(-1), counted, False)
        exact = self.form.dtype == torch.float64
        lse, heats = self._begin(exact)
        for heat, ratio in heats:
            warm = self.iterate(gamma, exact, _WARM, 50, heat)
            counted += warm.iterations
            gamma = warm.gamma * ratio  # g stays, tau falls
        found = self.iterate(gamma, exact, settings.tolerance, settings.max_iterations, lse=None if heats else lse)
        counted += found.iterations
        if found.wide:  # as far as float32 could tell: the rest in float64
            found = self.iterate(found.gamma, True, settings.tolerance, settings.max_iterations)
            counted += found.iterations
            found.wide = True
        found.iterations, found.proof = counted, self.proof
        return found

    def _begin(self, wide: bool) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The rows' lse without prices, and factors [B, H, 1, 1] to the temperature, falling to 1, each with its ratio
        to the next: none where the rows are not peaked."""
        rows = one_sided(self.side(wide)[0], torch.zeros_like(self.marginals.column), self.marginals.live)
        found = self.engine.forward(rows, NEEDED)
        log_keys = found["support"].clamp(min=1).log()
        peaked = found["entropy"].sum(-1) < _PEAKED * log_keys.sum(-1)
        if not bool(peaked.any()):
            return found["lse"], []
        # The scores' own spread: of their distribution under the prior alone, which an extreme temperature gives.
        hot = 1e6
        flat = self.engine.forward(dataclasses.replace(rows, temperature=hot), ("score_variance", "max_scores", "cost"))
        above = torch.where(found["support"] > 0, flat["max_scores"] + flat["cost"], 0.0)
        spread = torch.maximum(flat["score_variance"].sqrt() * hot, above / 4).amax(-1)  # [B, H]
        tau = rows.temperature.squeeze(3).squeeze(2) if isinstance(rows.temperature, Tensor) else rows.temperature
        ratio = torch.where(peaked, spread / tau, 1.0).double().nan_to_num(1.0, 1.0, 1.0).clamp(min=1.0)
        steps = math.ceil(float(ratio.max().log()) / math.log(_FACTOR))
        step = (ratio ** (1 / max(1, steps)))[:, :, None, None]
        return found["lse"], [(step ** (steps - n), step.squeeze(3)) for n in range(steps)]

    def iterate(
        self,
        gamma: Tensor,
        wide: bool,
        tolerance: float,
        limit: int,
        heat: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Found:
        """Anderson-mixed Sinkhorn until each head's residual is below the tolerance (or what float32 can tell)."""
        marginals = self.marginals
        B, H, Tk = gamma.shape
        kappa = marginals.kappa if heat is None else marginals.kappa * heat.squeeze(3)
        weight = marginals.column / marginals.column.sum(-1, keepdim=True).clamp(min=1e-300)
        moves, changes = (gamma.new_zeros(B, H, _MEMORY, Tk) for _ in range(2))  # of gamma, and of the step
        before = gamma, torch.zeros_like(gamma)
        best = torch.full((B, H), math.inf, dtype=gamma.dtype, device=gamma.device)
        lowest, fallback = best.clone(), gamma
        fresh = torch.ones(B, H, dtype=torch.bool, device=gamma.device)  # no step before to compare with
        iterations = torch.zeros(B, H, dtype=torch.long, device=gamma.device)
        done, final = ~fresh, (gamma, gamma, best)
        coarse, mark = False, best
        still, least, since = done, best, iterations.clone()
        for number in range(limit):
            phi, received = self.sweep(gamma, wide, heat, lse if number == 0 else None)
            target = marginals.target(gamma, kappa)
            residual = torch.where(marginals.live, (received - gamma).exp() - target, 0.0)
            # Where no plan meets the marginals the prices run off, until exp(L - gamma) has no digits that are true and
            # the residual may be anything, 0 too: what cannot be told is not an arrival, nor better than what was.
            size = torch.stack([t.abs().amax(-1) for t in (phi, received, gamma)]).amax(0)  # [B, H]
            blind = torch.finfo(torch.float64).eps * size > tolerance
            share = self.share(residual.abs()).masked_fill(blind, math.inf)
            dual = (marginals.row * phi).sum(-1) + self._price(gamma, kappa)
            iterations += ~done
            if number == 0 and not wide:
                floor = torch.finfo(torch.float32).eps / 2 * float(size.max())
                if floor > tolerance:
                    coarse, tolerance = True, max(tolerance, 16 * floor)
            better = ~blind & ((share < best) | (dual < lowest - 1e-13 * (1 + lowest.abs())))
            good = fresh | better
            arrived = good & ~(share > tolerance)  # NaN does not get better
            kept = [
                torch.where((done | ~good)[..., None], a, b) for a, b in zip(final[:2], (gamma, residual), strict=True)
            ]
            final = kept[0], kept[1], torch.where(done | ~good, final[2], share)
            done = done | arrived
            if self.doubtful and number >= 4 and number.bit_count() == 1 and not bool(done.all()):
                excess = residual / torch.where(marginals.live, target, 1.0)
                self._look_for_proof(gamma, excess.nan_to_num(0.0), tolerance=tolerance)
            better = share < least * 0.99
            least, since = torch.where(better, share, least), torch.where(better, number, since)
            still = still | (~done & (number - since >= max(_STILL, limit // 4)))
            done = done | still | self.impossible
            if bool(done.all()):
                break
            if not wide and number % _PATIENCE == _PATIENCE - 1:  # rounding keeps float32 from getting better?
                if not bool((~done & (final[2] < mark / 2)).any()):
                    coarse = True
                    break
                mark = final[2]
            # A step that was no good: back to the plain one from the last good point, and the memory is lost.
            best, lowest = torch.where(good, share, best), torch.where(good, dual, lowest)
            plain = torch.where(marginals.live, (received - marginals.column.log()) / (1 + kappa), 0.0)
            step = marginals.level(plain - gamma, weight) if marginals.balanced else self._settled(plain, kappa) - gamma
            slot = number % _MEMORY
            known = (good & ~fresh)[..., None]
            moves[:, :, slot] = torch.where(known, gamma - before[0], 0.0)
            changes[:, :, slot] = torch.where(known, step - before[1], 0.0)
            lost = ~good[..., None, None]
            moves, changes = moves.masked_fill(lost, 0.0), changes.masked_fill(lost, 0.0)
            before = gamma, step
            mixed = gamma + step - _mix(moves, changes, step, weight)
            following = torch.where(good[..., None], mixed, fallback)
            fallback = torch.where(good[..., None], gamma + step, fallback)
            fresh = ~good
            gamma = torch.where(done[..., None], gamma, following)
        return Found(final[0], final[1].abs(), final[2], iterations, coarse, still)

    def _look_for_proof(self, *orders: Tensor, tolerance: float) -> None:
        """That a head has no plan: queries that may read certain keys alone and ship more than those may receive.

        Where there is none, Sinkhorn's steps overfill just such keys, and their prices leave those of others behind. So
        with the keys in either order, highest first, the first k of them are tried, for every k at once: a query is
        confined to them if the last key that it may read is among them. The test is exact, whatever the numbers are.
        """
        marginals, form = self.marginals, self.side(False)[0].without_scores()
        none = torch.zeros_like(marginals.column)
        form = dataclasses.replace(one_sided(form, none, marginals.live), scale=1.0, temperature=1.0)
        for order in orders:
            keys = torch.where(marginals.live, order, -math.inf).argsort(-1, descending=True)  # [B, H, Tk]
            rank = keys.argsort(-1)
            last = self.engine.forward(_folded(form, -rank.double()), ("max_scores",))["max_scores"]
            last = last.clamp(min=0).round().long()  # [B, H, Tq]
            shipped = none.scatter_add(-1, last, marginals.row).cumsum(-1)  # by the queries confined to the first k
            received = marginals.column.gather(-1, keys).cumsum(-1)
            over, most = (shipped - received).max(-1)
            proved = over > max(tolerance, 1e-6) * marginals.row.sum(-1)
            if not self.proof and bool(proved.any()):
                b, h = (int(n) for n in proved.nonzero()[0])
                k = int(most[b, h])
                self.proof = (
                    f"there is no plan: in head {h} of batch {b}, "
                    f"{int((self.queries[b, h] & (last[b, h] <= k)).sum())} queries ship {float(shipped[b, h, k]):.6g} "
                    f"and may read only {k + 1} keys, which are to receive {float(received[b, h, k]):.6g}"
                )
            self.impossible = self.impossible | proved

    def _settled(self, gamma: Tensor, kappa: Tensor) -> Tensor:
        """Relaxed prices, all moved by as much as makes what a document's keys ask for what its queries ship: the one
        direction in which Sinkhorn's own steps are slow where rho is large."""
        groups = self.marginals.groups
        asked = groups.total(self.marginals.target(gamma, kappa), groups.keys)
        shipped = groups.total(self.marginals.row, groups.queries)
        both = (asked > 0) & (shipped > 0)
        ratio = torch.where(both, shipped, 1.0) / torch.where(both, asked, 1.0)
        shift = ratio.log() / torch.where(kappa > 0, kappa, 1.0)
        return torch.where(self.marginals.live, gamma + groups.each(shift, groups.keys), 0.0)

    def share(self, residual: Tensor) -> Tensor:
        groups = self.marginals.groups
        off, due = groups.total(residual, groups.keys), groups.total(self.marginals.column, groups.keys)
        return torch.where(due > 0, off / torch.where(due > 0, due, 1.0), 0.0).amax(-1)

    def _price(self, gamma: Tensor, kappa: Tensor) -> Tensor:
        """The columns' part of the dual value, in units of tau."""
        relaxed = torch.expm1(kappa * gamma) / torch.where(kappa > 0, kappa, 1.0)
        return (self.marginals.column * torch.where(kappa > 0, relaxed, gamma)).sum(-1)

    # The linear system of the gradient

    def pull(self, gamma: Tensor, rhs: Tensor, wide: bool, limit: int, tolerated: float) -> Tensor:
        """x = M^-1 rhs, by conjugate gradients."""
        marginals = self.marginals
        phi, received = self.sweep(gamma, wide)
        rows, columns = self.rows(gamma, wide), self.columns(phi, wide)
        c = torch.where(marginals.live, (received - gamma).exp(), 0.0)
        diagonal = torch.where(marginals.live, c + marginals.kappa * marginals.target(gamma), 1.0)
        balanced = marginals.balanced

        def product(x: Tensor) -> Tensor:
            sent = self.engine.forward(dataclasses.replace(rows, value=per_head(rows, x)), ("out",))["out"]
            values = own_head(rows, sent)[..., None].to(columns.dtype)
            back = self.engine.forward(dataclasses.replace(columns, value=values), ("out",))["out"].squeeze(3)
            return torch.where(marginals.live, diagonal * x - c * back.double(), 0.0)

        def centred(x: Tensor) -> Tensor:  # M knows no common price of a document's keys
            return marginals.level(x, c) if balanced else x

        r = torch.where(marginals.live, rhs.double(), 0.0)
        if balanced:
            r = c * centred(r / diagonal)
        x = torch.zeros_like(r)
        z = centred(r / diagonal)
        p, rz = z, (r * z).sum(-1, keepdim=True)
        first = rz.clone()
        narrow = self.form.dtype != torch.float64
        tolerance = (1e-9 if wide else 1e-6) if narrow else 1e-13
        tolerance = max(tolerance, min(_COARSEST, (tolerated - _TOLERANCE) / 10))
        for _ in range(limit):
            going = rz > tolerance**2 * first
            if not bool(going.any()):
                break
            q = product(p)
            curvature = (p * q).sum(-1, keepdim=True)
            going = going & (curvature > 0)
            if not bool(going.any()):
                break
            alpha = torch.where(going, rz / torch.where(curvature > 0, curvature, 1.0), 0.0)
            x, r = x + alpha * p, r - alpha * q
            z = centred(r / diagonal)
            following = (r * z).sum(-1, keepdim=True)
            p = torch.where(going, z + following / torch.where(rz > 0, rz, 1.0) * p, p)
            rz = torch.where(going, following, rz)
        off = float((rz / torch.where(first > 0, first, 1.0)).clamp(min=0).sqrt().max()) if rz.numel() else 0.0
        if off > min(100 * tolerance, 10 * _COARSEST):
            warnings.warn(
                f"RowsAndColumns: the gradient's linear system was left at a relative residual of {off:.1e} "
                f"(expected {tolerance:.0e}): its solution at this temperature is nearly singular",
                stacklevel=2,
            )
        return x


def _heated(form: Form, heat: Tensor | None) -> Form:
    return form if heat is None else dataclasses.replace(form, temperature=(form.temperature * heat).to(form.dtype))


def _mix(moves: Tensor, changes: Tensor, step: Tensor, weight: Tensor) -> Tensor:
    """What Anderson's mixing takes off gamma + step: (moves + changes) theta, theta the least squares fit of the step
    by its changes. What has been cleared is 0, and so is its theta."""
    weighted = changes * weight[:, :, None]
    matrix = weighted @ changes.mT  # [B, H, m, m]
    # Each change in units of its own: early ones are larger by many orders.
    units = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    units = torch.where(units > 0, units, 1.0)
    matrix = matrix / (units[..., None] * units[..., None, :])
    ridge = torch.where(matrix.diagonal(dim1=-2, dim2=-1) > 0, 1e-12, 1.0)
    matrix = matrix + torch.diag_embed(ridge)
    theta = torch.linalg.solve_ex(matrix, (weighted @ step[..., None]) / units[..., None])[0] / units[..., None]
    return ((moves + changes).mT @ theta).squeeze(-1).nan_to_num(0.0, 0.0, 0.0)


# --- the gradient -----------------------------------------------------------------------------------------------------


class Prices(torch.autograd.Function):
    """apply(form without tensors, slots, backend, limits, found, marginals, row, column, kappa, *tensors) -> gamma; the
    marginals' own tensors are given again, where autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        slots: tuple,
        backend: str,
        limits: tuple[int, float],  # steps and tolerance
        found: Found,
        marginals: Marginals,
        row: Tensor,
        column: Tensor,
        kappa: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.form, ctx.slots, ctx.backend, ctx.limits = form, slots, backend, limits
        ctx.wide, ctx.groups, ctx.complete = found.wide, marginals.groups, marginals.complete
        gamma = found.gamma.clone()
        ctx.save_for_backward(gamma, row, column, kappa, *tensors)
        return gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        gamma, *given = ctx.saved_tensors
        needs = ctx.needs_input_grad[6:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(given, needs, strict=True)]
        marginals = Marginals(leaves[0], leaves[1], leaves[2], ctx.groups, ctx.complete)
        form = ctx.form.with_tensors(dict(zip(ctx.slots, leaves[3:], strict=True)))
        solver = Solver(ctx.backend, form, marginals)
        x = solver.pull(gamma, grad, ctx.wide, *ctx.limits)
        with torch.enable_grad():
            rows = one_sided(widened(form) if ctx.wide else form, gamma, marginals.live)
            rows = dataclasses.replace(rows, value=per_head(rows, x))
            sent = own_head(rows, ops.run(ctx.backend, rows, ("out",))["out"])
            off = (marginals.row * sent).sum() - (marginals.target(gamma) * x).sum()
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(off, wanted, allow_unused=True))
        return (None,) * 6 + tuple(next(found) if need else None for need in needs)


# --- the operator -----------------------------------------------------------------------------------------------------


@dataclass
class Solved:
    """A problem brought to its rows: the plan of the one-sided `form`, each row times `row`, is the answer."""

    form: Form
    row: Tensor | None  # [B, H, Tq] where it is not form.mass
    marginals: Marginals
    gamma: Tensor  # [B, H, Tk], each document's mean 0 where nothing else fixes it
    iterations: Tensor  # [B, H]


def reduce(backend: str, form: Form, settings: RowsAndColumns) -> Solved:
    """Find the keys' prices; differentiable."""
    if torch._C._are_functorch_transforms_active() or ops.forward_mode():
        raise NotImplementedError(
            "RowsAndColumns has no torch.func transforms and no forward mode: use reverse mode (backward)"
        )
    marginals = Marginals.of(backend, form)
    wide = False
    if settings.iterations is None:
        solver = Solver(backend, form, marginals)
        with torch.no_grad():
            found = solver.solve(settings)
            if marginals.balanced:
                found.gamma = solver.marginals.level(found.gamma, solver.marginals.column)
        _report(found, settings)
        wide, iterations = found.wide, found.iterations
        narrow = _bare(form)
        slots = {n: t for n, t in narrow.tensors().items() if n not in ("value", "row_mass", "column_mass", "level")}
        gamma: Tensor = Prices.apply(  # type: ignore[assignment]
            ops._skeleton(narrow), tuple(slots), backend, (settings.max_iterations, settings.tolerance), found,
            marginals.detached(), marginals.row, marginals.column, marginals.kappa, *slots.values(),
        )  # fmt: skip
        if marginals.balanced:  # the value is there already; this is for the derivative of the prices themselves
            gamma = marginals.level(gamma, marginals.column)
    else:
        gamma = _unrolled(backend, form, marginals, settings.iterations)
        iterations = torch.full(form.shape[:2], settings.iterations, device=gamma.device)
    rows = one_sided(widened(form) if wide else form, gamma, marginals.live)
    return Solved(rows, marginals.row if form.row_mass is not None else None, marginals, gamma, iterations)


def _report(found: Found, settings: RowsAndColumns) -> None:
    """Say so if the columns were not met."""
    off = found.share
    missed = off > settings.tolerance
    if not bool(missed.any()):
        return
    where, worst = int(missed.sum()), float(off.max())
    amount = f"{worst:.2e} of the mass is" if worst < math.inf else "more of the mass than float64 can tell may be"
    reason = "the temperature is small, or masks and marginals leave no plan that meets them"
    if found.proof:
        reason = found.proof
    elif found.still is not None and bool((found.still & missed).any()):
        reason = f"it stands still; {reason}"
    text = (
        f"RowsAndColumns: after {int(found.iterations.max())} iterations {amount} in a "
        f"wrong column (tolerance {settings.tolerance:.0e}) in {where} of {off.numel()} heads: {reason}"
    )
    if settings.strict:
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)


def _unrolled(backend: str, form: Form, marginals: Marginals, iterations: int) -> Tensor:
    """gamma after a fixed number of normalisations, the last of the rows still to come; autograd sees each pass."""
    queries, keys = marginals.row > 0, marginals.live
    log_row = torch.where(queries, marginals.row, 1.0).log()
    log_column = torch.where(keys, marginals.column, 1.0).log()
    gamma = torch.zeros_like(marginals.column)
    narrow = _bare(form)
    turned = _bare(transposed(narrow))
    for _ in range(iterations // 2):
        lse = ops.run(backend, one_sided(narrow, gamma, keys), ("lse",))["lse"]
        phi = torch.where(queries, lse, 0.0) - log_row
        received = ops.run(backend, one_sided(turned, phi, queries), ("lse",))["lse"]
        gamma = torch.where(keys, torch.where(keys, received, 0.0) - log_column, 0.0) / (1 + marginals.kappa)
    return gamma


_SCALED = ("max_weight", "first_key_mass", "mass", "cost")  # proportional to what a row ships


def run(backend: str, form: Form, names: tuple[str, ...], settings: RowsAndColumns) -> dict[str, Tensor]:
    """Output and statistics; `statistics` says what each is, and what follows is how the one-sided plan gives it."""
    solved = reduce(backend, form, settings)
    rows, a = solved.form, solved.row
    asked = set(names) - {"lse", "value", "kl", "column_dual", "column_residual", "iterations"}
    if a is not None:
        asked -= {"key_mass"}
        if "value_spread" in names:
            asked |= {"out"}
    if "value" in names:
        asked |= {"dual"}
    if "kl" in names:
        asked |= {"cost", "support"}
    found = ops.run(backend, rows, tuple(sorted(asked))) if asked else {}
    results = {name: found[name] for name in names if name in found}
    if a is not None:
        scale = a.to(rows.dtype)
        if "value_spread" in results:  # a sum p |v|^2 - |a o|^2
            results["value_spread"] = scale * found["value_spread"] + (scale - scale**2) * (found["out"] ** 2).sum(-1)
        for name in results:
            if name in _SCALED:
                results[name] = results[name] * scale
        if "out" in results:
            results["out"] = results["out"] * scale[..., None]
        if "collision" in results:
            results["collision"] = results["collision"] * scale**2
    with torch.no_grad():
        results |= _others(backend, form, names, solved, found)
    if "lse" in names:  # of the scores and the prior alone
        results["lse"] = ops.run(backend, one_sided(_bare(form)), ("lse",))["lse"]
    return {n: (r if n in DIFFERENTIABLE else r.detach()).to(form.dtype) for n, r in results.items()}


def _column_sums(engine: Any, rows: Form, a: Tensor) -> Tensor:
    """What each key does receive, sum_i a_i p_ij [B, H, Tk], of the plan's own weights: exp(L - gamma), which the
    prices alone give, has no true digits where they are large. It is the gradient of sum_ij a_i p_ij x_j in x."""
    B, H, _, Tk = rows.shape
    group = rows.group
    with torch.no_grad():
        rows = dataclasses.replace(rows, value=per_head(rows, a.new_zeros(B, H, Tk)))
        own = torch.eye(group, dtype=rows.dtype, device=a.device).repeat(H // group, 1)  # [H, group]: each head its own
        incoming = {"out": a.to(rows.dtype)[..., None] * own[:, None]}
        outputs = engine.forward(rows, ("out", *(n for n in engine.saved(rows, ("out",)) if n != "out")))
        found = engine.backward(rows, ("value",), outputs, incoming)["value"]  # [B, Hkv, Tk, group]
    return found.mT.reshape(B, H, Tk).double()


def _others(
    backend: str, form: Form, names: tuple[str, ...], solved: Solved, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The statistics that the one-sided plan does not have, or has of another prior."""
    engine, rows, marginals = ops.BACKENDS[backend], _bare(solved.form), solved.marginals.detached()
    rows = rows.with_tensors({n: t.detach() for n, t in rows.tensors().items()})
    gamma, a = solved.gamma.detach().double(), marginals.row
    tau: Any = solved.form.temperature
    tau = tau.detach().squeeze(3) if isinstance(tau, Tensor) else tau
    none = found.get("dual", a) == -math.inf
    results = {}
    price = found.get("dual", a) + tau * (math.log(solved.form.mass) - torch.where(a > 0, a, 1.0).log())  # f
    if "dual" in names:
        results["dual"] = torch.where(none, found["dual"], price)
    if "value" in names or "kl" in names:  # what the prices of its keys come to, for a row of mass 1
        keys = per_head(rows, gamma)
        paid = own_head(rows, engine.forward(dataclasses.replace(rows, value=keys), ("out",))["out"])
        if "value" in names:
            results["value"] = torch.where(none, -math.inf, a * (torch.where(none, 0.0, price) + tau * paid))
        if "kl" in names:
            lse = engine.forward(rows, ("lse",))["lse"]
            bare = one_sided(_bare(form).without_scores())
            prior = found["support"].log() if not form.weighted else engine.forward(bare, ("lse",))["lse"]
            mean = -found["cost"] / (solved.form.mass * tau)
            total = mean - paid - lse + prior
            results["kl"] = torch.where(found["support"] > 0, total, 0.0).clamp(min=0)
    if ("key_mass" in names and solved.row is not None) or "column_residual" in names:
        mass = _column_sums(engine, rows, a)
        if "key_mass" in names and solved.row is not None:
            results["key_mass"] = mass
        if "column_residual" in names:
            results["column_residual"] = (mass - marginals.target(gamma)).abs()
    if "column_dual" in names:
        results["column_dual"] = gamma * tau
    if "iterations" in names:
        results["iterations"] = solved.iterations
    return results
