"""From the sums of a row to its statistics: the definitions of regard/statistics.py in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...form import Form
from ..row_gradient import row_value

LOG2E, LN2 = math.log2(math.e), math.log(2)
_NOTHING = -math.inf

# The groups of sums (kernels/forward_kl.py) that each statistic of KL needs.
KL_GROUPS = {
    "lse": (),
    "dual": (),
    "value": ("counts", "prior"),
    "entropy": ("moments",),
    "kl": ("moments", "counts", "prior", "scores"),
    "max_scores": ("scores",),
    "max_weight": (),
    "score_variance": ("moments", "squares", "scores"),
    "collision": ("counts",),
    "support": ("counts",),
    "first_key_mass": ("counts",),
    "mass": (),
    "cost": ("moments", "scores"),
    "value_spread": ("spread",),
}
STATISTICS = (*KL_GROUPS, "key_mass")


def statistics_kl(form: Form, sums: Tensor, names: set[str]) -> dict[str, Tensor]:
    """The statistics of KL rows, [B, H, Tq] each. `sums` [14, B, H, Tq] as kernels/forward_kl.py stores them."""
    m, z, factor, e1, e2, s1, s2, anchor, top, count, squares, first, log_prior_mass, spread = sums
    tau, level = row_value(form.temperature), row_value(form.marginal_parameter)
    c = LOG2E / tau
    sink = form.marginal == "sink"
    invalid = z.isnan() | m.isnan()
    keys = (z > 0) | invalid
    null_x = level * c + torch.zeros_like(m) if sink else torch.full_like(m, _NOTHING)
    highest = torch.maximum(m, null_x)
    some = keys | sink
    safe = torch.where(some, highest, 0.0)
    real = torch.where(keys, (m - safe).exp2(), 0.0)
    null = (null_x - safe).exp2()
    total = torch.where(some, z * real + null, 1.0)
    log_total = total.log2()
    lse = torch.where(some, LN2 * (safe + log_total), _NOTHING)
    part, null_part = torch.where(some, real / total, 0.0), torch.where(some, null / total, 0.0)
    found: dict[str, Tensor] = {}
    dual = torch.where(some, tau * lse, _NOTHING)
    prior_mass = count if not form.weighted else torch.where(keys, log_prior_mass.exp2(), 0.0)
    value = dual.clone()  # results do not share memory
    if form.marginal == "rows" and form.mass != 1:
        dual = dual - tau * math.log(form.mass)
        value = dual * form.mass
    elif form.marginal == "relax":
        dual = dual * (level / (tau + level))
        sent = torch.where(keys, (dual / level).exp(), 0.0)
        value = (tau + level) * sent - tau * prior_mass - level
    elif form.marginal == "free":
        dual = torch.where(invalid, -level + 0 * m, torch.zeros_like(m) - level)
        value = tau * (factor * z - prior_mass)
    found |= {"dual": dual, "value": value}
    if names & {"entropy", "kl", "score_variance"}:
        shift = torch.where(keys, m - safe, 0.0)
        null_shift = torch.where(null > 0, null_x - safe, 0.0)
        mean = part * (e1 + shift * z) + null_part * null_shift
        entropy = torch.where(some, LN2 * (log_total - mean), 0.0)
        found["entropy"] = entropy.clamp(min=0)
        square = part * (e2 + shift * (2 * e1 + shift * z)) + null_part * null_shift**2
        variance = LN2**2 * (square - mean**2)
        if form.weighted:
            # Within the keys, and between them and the null key: squares around a key would lose all digits where a
            # far null key has the mass.
            some_weight = torch.where(keys, z, 1.0)
            mean_y = s1 / some_weight
            within = (s2 / some_weight - mean_y**2).clamp(min=0)
            gap = torch.where(keys, level - anchor, 0.0) - mean_y if sink else 0.0
            variance = part * z * (within + null_part * gap**2) / tau**2
        found["score_variance"] = torch.where(some, variance.clamp(min=0), 0.0)
        log_mass = torch.where(keys, log_prior_mass if form.weighted else count.log2(), _NOTHING)
        log_prior = torch.zeros_like(m)
        if form.weighted:
            log_prior = torch.where(keys, part * (z * (m - c * anchor) + e1 - c * s1), 0.0)
        if sink:
            log_mass = (log_mass.exp2() + 1).log2()
        found["kl"] = torch.where(some, (LN2 * (log_mass - log_prior) - entropy).clamp(min=0), 0.0)
    scored = anchor * z + s1 if form.weighted else (m * z + e1) / c
    found["cost"] = torch.where(keys, -factor * scored, 0.0)
    found["max_scores"] = torch.where(invalid, math.nan, top if form.weighted else torch.where(keys, m / c, _NOTHING))
    found["max_weight"] = torch.maximum(torch.where(keys, factor, 0.0), null_part)
    found["collision"] = torch.where(keys, factor**2 * squares, 0.0) + null_part**2
    found["support"] = torch.where(invalid, math.nan, count)
    found["first_key_mass"] = torch.where(keys, factor * (first - m).exp2(), 0.0)
    found["mass"] = torch.where(keys, factor * z, 0.0)
    found["value_spread"] = factor * spread
    return {name: found[name] for name in names}


def centred_squares(form: Form) -> tuple[Tensor, Tensor]:
    """A point among the values [B, Hkv, 1, Dv], and each key's squared distance to it [B, Hkv, Tk]."""
    assert form.value is not None
    value = form.value.detach().to(form.dtype)
    finite = value.isfinite()  # keys that are masked for every query may hold NaN
    centre = torch.where(finite, value, 0.0).sum(2, keepdim=True) / finite.sum(2, keepdim=True).clamp(min=1)
    squares = torch.where(finite, value - centre, 0.0).square().sum(-1)
    return centre, squares.contiguous()


def add_spread(form: Form, spread: Tensor, out: Tensor, centre: Tensor, mass: Tensor) -> Tensor:
    """sum p |v|^2 - |o|^2 from sum p |v - centre|^2: a common offset of the values costs no digits."""
    centre = centre.repeat_interleave(form.group, 1)
    short = 1 - mass
    if form.marginal == "rows" and form.family != "fermi_dirac":  # the mass is known exactly; the factor may be large
        short = torch.where(mass == 0, 1.0, 1 - form.mass)
    return spread + short * (centre**2).sum(-1) - ((out - centre) ** 2).sum(-1)


# --- regularisers with a link -----------------------------------------------------------------------------------------

# The groups of sums (kernels/forward_link.py) that each statistic needs.
LINK_GROUPS = {
    "dual": (),
    "value": ("value",),
    "entropy": ("logs",),
    "kl": ("logs", "counts"),
    "max_scores": ("top",),
    "max_weight": ("top",),
    "score_variance": ("scores",),
    "collision": ("counts",),
    "support": ("counts",),
    "first_key_mass": ("counts",),
    "mass": (),
    "cost": ("scores",),
    "value_spread": ("spread",),
}


class LinkRows:
    """The rows of a regulariser with a link: their sums, and what follows from them, [B, H, Tq] each."""

    def __init__(self, form: Form, sums: Tensor, peak: Tensor, rest: Tensor, centred: bool) -> None:
        self.form, self.sums = form, sums
        self.tau, self.level = row_value(form.temperature), row_value(form.marginal_parameter)
        self.origin = float(centred)
        self.sigmoid = form.family == "fermi_dirac"
        self.alpha = 2.0 if self.sigmoid else row_value(form.parameters[0])
        self.c = LOG2E / self.tau if self.sigmoid else (self.alpha - 1) / self.tau
        self.free, self.sink = form.marginal == "free", form.marginal == "sink"
        self.mass, self.slope, self.top = sums[0], sums[1], sums[2]
        self.idle = peak == _NOTHING
        anchor = torch.where(self.idle, 0.0, peak)
        self.dual = (anchor - rest - self.origin) / self.c
        if self.free:
            self.dual = torch.zeros_like(rest) - self.level
        self.dual = torch.where(self.idle, _NOTHING, self.dual)
        self.null = self.null_w = self.null_y = torch.zeros_like(rest)
        if self.sink:
            y = torch.where(self.idle, 0.0, self.level * self.c - anchor + rest + self.origin).clamp(min=0)
            some = y > 0
            log_y = torch.where(some, y, 1.0).log() / (self.alpha - 1)
            self.null_y = y
            self.null = torch.where(some, log_y.exp(), 0.0)
            self.null_w = torch.where(some, self.null / torch.where(some, y, 1.0), 0.0)
        self.all_mass = self.mass + self.null
        fixed = not self.free and form.marginal != "relax"
        # The rounding error of the price is distributed in proportion to the weights.
        # Fermi-Dirac: the keys take all that they can, which is nothing where there is no key.
        self.full = (rest == math.inf) | self.idle if self.sigmoid and not self.free else torch.zeros_like(self.idle)
        known = (self.all_mass > 0) & ~self.full if fixed else torch.zeros_like(self.idle)
        self.share = torch.where(known, form.mass / torch.where(known, self.all_mass, 1.0), 1.0)
        self.kappa = torch.zeros_like(rest)
        if form.marginal == "relax":
            self.kappa = torch.where(self.idle, 0.0, self.tau * (self.dual / self.level).exp() / self.level)
        total = self.slope + self.null_w + self.kappa
        self.baseline_share = torch.where(total > 1e-37, 1 / torch.where(total > 1e-37, total, 1.0), 0.0)
        self.baseline_share = torch.where(self.mass.isnan(), math.nan, self.baseline_share)

    def entropy(self) -> Tensor:
        total = torch.where(self.all_mass > 0, self.all_mass, 1.0)
        logs = self.sums[4] + torch.where(
            self.null > 0, self.null * torch.where(self.null > 0, self.null, 1.0).log2(), 0.0
        )
        found = LN2 * (total.log2() - logs / total)
        return torch.where(self.all_mass.isnan(), math.nan, torch.where(self.all_mass > 0, found.clamp(min=0), 0.0))

    def baseline_log(self, entropy: Tensor) -> Tensor:
        """The mean of log q + H with weights w, where q is the plan over its mass."""
        w_sum = self.slope + self.null_w
        logs = LN2 * self.sums[5]
        logs = logs + self.null_w * torch.where(self.null > 0, self.null, 1.0).log()
        return (logs + (entropy - self.log_mass()) * w_sum) * self.baseline_share

    def log_mass(self) -> Tensor:
        """The logarithm of the plan's mass (the null key included), as the backward pass uses it."""
        if self.free or self.sigmoid:
            sent = self.all_mass * self.share
            return torch.where(sent > 0, sent, 1.0).log()
        if self.form.marginal == "relax":
            return torch.where(self.idle, 0.0, self.dual / self.level)
        return torch.full_like(self.mass, math.log(self.form.mass))

    def statistics(self, names: set[str]) -> dict[str, Tensor]:
        (_, _, top, heaviest, _, _, log_prior, s1, s2, reference, count, support, squares, first, prior_mass, value,
         spread) = self.sums[:17]  # fmt: skip
        form, tau, total = self.form, self.tau, torch.where(self.all_mass > 0, self.all_mass, 1.0)
        invalid = self.mass.isnan() | top.isnan()
        found = {"dual": self.dual, "mass": self.mass * self.share}
        if "entropy" in names or "kl" in names:
            found["entropy"] = entropy = self.entropy()
            prior = prior_mass + 1 if self.sink else prior_mass
            kl = LN2 * (prior.clamp(min=1e-37).log2() - log_prior / total) - entropy
            found["kl"] = torch.where(self.all_mass > 0, kl.clamp(min=0), 0.0)
        found["max_scores"] = top / self.c
        found["max_weight"] = self.share * torch.maximum(heaviest, self.null)
        mean = torch.where(self.mass > 0, s1 / torch.where(self.mass > 0, self.mass, 1.0), 0.0)
        gap = torch.where(self.mass > 0, self.level * self.c - reference - mean, 0.0) if self.sink else 0.0
        variance = ((s2 - s1 * mean).clamp(min=0) + self.mass * self.null / total * gap**2) / total
        found["score_variance"] = torch.where(self.all_mass > 0, variance / (self.c * tau) ** 2, 0.0)
        found["cost"] = torch.where(self.mass > 0, -self.share * (s1 + reference * self.mass) / self.c, 0.0)
        found["collision"] = self.share**2 * (squares + self.null**2)
        found["support"] = count if self.sigmoid else support
        found["first_key_mass"] = self.share * first
        found["value_spread"] = self.share * spread
        if "value" in names:
            if self.sigmoid:
                energy = tau * LN2 * value
            else:
                energy = tau / self.alpha * (value + torch.where(self.null > 0, self.null * self.null_y, 0.0))
            if form.marginal == "relax":
                energy = energy + self.level * (torch.where(self.idle, 0.0, (self.dual / self.level).exp()) - 1)
            elif not self.free:
                energy = energy + form.mass * self.dual
            found["value"] = torch.where(self.full, -found["cost"], energy)
        return {
            n: torch.where(invalid, math.nan, found[n]) if n != "dual" or not self.free else found[n] for n in names
        }
