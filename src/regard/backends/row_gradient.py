"""The gradient of a row's own parameters, derived once for every regulariser and marginal.

Every backend with fused kernels uses it. (The reference backend differentiates its own operations by autograd.)

The parameters are the temperature tau, the score of a sink, the relaxation rho, the offset of free rows, alpha and the
slopes of ALiBi. Write p_j = pi_j g((s_j - lambda)/tau) for the plan, and T(lambda) for the mass that the row must send;
the null key of a sink counts as a key. The price lambda solves sum_j p_j = T. With u_j = dL/dp_j, w_j = pi_j g' and the
baseline b = sum_j w_j u_j / (sum_j w_j + kappa), the implicit function theorem gives for any parameter theta

    dL/dtheta  =  sum_j (u_j - b) dp_j/dtheta  +  b dT/dtheta,        both derivatives at a fixed price.

A fused kernel sums the first term over the keys, with G_j = tau dL/ds_j = w_j (u_j - b):

    tau        dp_j/dtau = -w_j (s_j - lambda)/tau^2     ->   -sum_j G_j (s_j - lambda) / tau^2
    sink s_0   dp_0/ds_0 =  w_0 / tau                    ->   G_0 / tau
    rho        T = exp(lambda/rho)                       ->   -b T lambda / rho^2
    offset     dp_j/do   =  w_j / tau                    ->   sum_j G_j / tau
    slopes     dp_j/dm   = -|distance| dp_j/dlog(pi)     ->   -sum_j |distance| dL/dlog(pi_j)

An incoming gradient of lse, which KL alone has, adds its own part: lse depends on s/tau and the sink, and on no price.
The terms that a kernel omits (the null key, known constants) are added here, and the rounding of its baseline is
removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..form import Form
from ..regularizers import regularizer_of

PARAMETERS = ("slopes", "marginal_parameter", "temperature", *(f"parameters.{n}" for n in range(4)))

# The sums over a row's keys from which the gradient of each parameter is computed, by kernel (csrc/engine/problem.h).
SUMS_KL = {
    "slopes": ("row_gd", "row_pd", "row_g", "row_dot"),
    "temperature": ("row_gs", "row_g", "row_ps", "row_dot"),
    "marginal_parameter": ("row_dot",),
}
SUMS_LINK = {
    "slopes": ("row_gd",),
    "temperature": ("row_gs", "row_g", "row_dot"),
    "parameters.0": ("row_ga", "row_g", "row_dot"),
    "marginal_parameter": ("row_g", "row_dot"),
}
# Of a regulariser of the user's own, any parameter.
SUMS_OWN = SUMS_LINK | {f"parameters.{n}": ("row_gl", "row_g", "row_dot") for n in range(4)}


def row_value(x: Any) -> Any:
    """A parameter in the shape of the sums: [B|1, H|1, Tq|1], or a number."""
    return x.squeeze(-1) if isinstance(x, Tensor) else x


class RowGradient:
    """The gradients of one backward pass, from a kernel's sums over the keys (`sums`), its outputs and the incoming
    gradients. `centred`: the kernel measures (alpha - 1)(s - lambda)/tau from 1, also in its sums."""

    def __init__(
        self,
        form: Form,
        sums: dict[str, Tensor],
        outputs: dict[str, Tensor],
        grads: dict[str, Tensor],
        centred: bool = False,
    ) -> None:
        self.form, self.sums, self.outputs, self.centred = form, sums, outputs, centred
        self.kl = form.family == "kl"
        self.tau, self.parameter = row_value(form.temperature), row_value(form.marginal_parameter)
        self.own = form.family not in ("kl", "tsallis", "fermi_dirac")  # the user's
        self.alpha: Any = row_value(form.parameters[0]) if form.family == "tsallis" else None
        self.dual = outputs["dual"]
        self.idle = self.dual == -torch.inf  # rows without an admissible key
        self.lse_grad: Any = grads.get("lse", 0.0)
        self.entropy_grad: Any = grads.get("entropy")
        self.sent: Any = form.mass  # T
        if form.marginal == "relax":
            self.sent = torch.where(self.idle, 1.0 if self.kl else 0.0, (self.dual / self.parameter).exp())
        elif form.marginal == "free" and self.kl:
            known = "lse" in outputs
            self.sent = (outputs["lse"] + self.parameter / self.tau).exp() if known else torch.zeros_like(self.dual)
        self._null_key()

    def of(self, slot: str) -> Tensor:
        """dL/dslot, [B, H, Tq, 1]."""
        if slot == "slopes":
            result = self._slopes()
        elif slot == "marginal_parameter":
            result = self._marginal_parameter()
        elif slot == "temperature":
            result = self._temperature()
        elif self.own:
            result = self._own_parameter(slot)
        else:
            result = self._alpha()
        return result[..., None]

    # --- the pieces of the formula ------------------------------------------------------------------------------------

    @property
    def baseline_mass(self) -> Any:
        """b T of relaxed rows. The KL kernel returns <grad_out, out> = sum_j p_j u_j, from which b follows: there
        sum_j w_j = T and kappa = T tau/rho."""
        dot = self.sums["row_dot"]
        return dot * (self.parameter / (self.tau + self.parameter)) if self.kl else dot * self.sent

    @property
    def free_gain(self) -> Any:
        """sum_j G_j of free rows, without lse's part."""
        return self.sums["row_dot"] if self.kl else self.sums["row_g"]

    def _null_key(self) -> None:
        """The null key of a sink: s_0 - lambda, p_0, G_0 and its advantage. It has no value, so u_0 comes from lse and
        entropy alone."""
        self.null_score: Any = 0.0
        self.null_weight: Any = 0.0
        self.null_gain: Any = 0.0
        if self.form.marginal != "sink" or "row_dot" not in self.sums:
            return
        self.null_score = self.parameter - self.dual
        if self.kl:
            log_weight: Any = self.null_score / self.tau
            inside: Any = None
            self.null_weight = slope = log_weight.exp()
        elif self.own:
            t = (self.null_score / self.tau)[..., None]
            weight, slope = (x.squeeze(-1) for x in self.form.regularizer.weights_and_slopes(t, None))
            self.null_weight, inside = weight, ~(weight <= 0)
            log_weight = torch.where(inside, weight, 1.0).log()
        else:
            y = ((self.alpha - 1) * self.null_score / self.tau).clamp(min=0)
            inside, y = ~(y <= 0), torch.where(y <= 0, 1.0, y)  # NaN stays
            log_weight = y.log() / (self.alpha - 1)  # not the logarithm of p_0, which may underflow
            self.null_ratio, self.null_weight = y, y ** (1 / (self.alpha - 1))
            slope = self.null_weight / y
        advantage = self.lse_grad - self.sums["row_dot"]  # the baseline; for KL because T = 1
        if self.entropy_grad is not None:
            advantage = advantage - self.entropy_grad * (log_weight + self.outputs["entropy"])
        self.null_advantage = advantage if inside is None else torch.where(inside, advantage, 0.0)
        self.null_gain = slope * self.null_advantage

    @property
    def total(self) -> Any:
        """sum_j G_j over the real keys, in exact arithmetic."""
        marginal = self.form.marginal
        if marginal == "relax":
            pulled = self.baseline_mass * (self.tau / self.parameter)
            return self.lse_grad + (pulled if self.kl else torch.where(self.idle, 0.0, pulled))
        if marginal == "free":
            return self.lse_grad + self.free_gain
        return self.lse_grad - self.null_gain if marginal == "sink" else self.lse_grad

    @property
    def excess(self) -> Tensor:
        """KL: what the rounding of the baseline added to sum_j G_j, per unit of mass. It is removed in proportion
        to the plan. (Free rows have no baseline: there it is the rounding of the terms of lse and entropy.)"""
        excess = self.sums["row_g"] - self.total
        if self.form.marginal == "free":
            return torch.where(self.sent > 1e-30, excess / self.sent, 0.0)
        return excess / self.sent

    # --- the parameters -----------------------------------------------------------------------------------------------

    def _marginal_parameter(self) -> Tensor:
        if self.form.marginal == "sink":
            return self.null_gain / self.tau
        if self.form.marginal == "relax":
            return torch.where(self.idle, 0.0, -self.baseline_mass * self.dual / self.parameter**2)
        return self.free_gain / self.tau

    def _temperature(self) -> Tensor:
        by_score = self.sums["row_gs"] + self.null_gain * self.null_score
        if self.kl:
            by_score = by_score - (self.sums["row_ps"] + self.null_weight * self.null_score) * self.excess
            by_score = by_score + torch.where(self.idle, 0.0, self.dual) * self.lse_grad
            return torch.where(self.idle, 0.0, -by_score / self.tau / self.tau)
        if self.centred:
            by_score = by_score + self.total * self.tau / (self.alpha - 1)
        return -by_score / self.tau / self.tau

    def _slopes(self) -> Tensor:
        if not self.kl:
            return -self.sums["row_gd"]
        return torch.where(self.idle, 0.0, self.sums["row_pd"] * self.excess - self.sums["row_gd"])

    def _own_parameter(self, slot: str) -> Tensor:
        """The kernel sums pi dg/dtheta (u - b) over the keys: at a fixed price, t does not depend on theta."""
        tensors = [f"parameters.{n}" for n, x in enumerate(self.form.parameters) if isinstance(x, Tensor)]
        result = self.sums["row_gl"].select(-4, tensors.index(slot))
        if self.form.marginal != "free":
            # The rounding of the baseline is removed as if every key were the best one.
            t = self.outputs["rest"][..., None]
            _, slope = self.form.regularizer.weights_and_slopes(t, None)
            change = self._by_parameter(slot, t) / slope.squeeze(-1)
            excess = (self.sums["row_g"] - self.total) * change
            result = result - torch.where(excess.isfinite(), excess, 0.0)
        if self.form.marginal == "sink":
            by = self._by_parameter(slot, (self.null_score / self.tau)[..., None])
            result = result + torch.where(by == 0, 0.0, by * self.null_advantage)
        return result

    def _by_parameter(self, slot: str, t: Tensor) -> Tensor:
        """dg/dtheta at one t per row."""
        n = int(slot.partition(".")[2])
        with torch.inference_mode(False), torch.enable_grad():
            values = [x.detach().clone() if isinstance(x, Tensor) else x for x in self.form.parameters]
            value = values[n]
            assert isinstance(value, Tensor)
            values[n] = value = value.expand(torch.broadcast_shapes(value.shape, t.shape)).clone().requires_grad_()
            regularizer = regularizer_of(self.form.family, values, checked=False)
            (by,) = torch.autograd.grad(regularizer.link(t.detach().clone()).sum(), value, allow_unused=True)
        return torch.zeros_like(t.squeeze(-1)) if by is None else by.squeeze(-1)

    def _alpha(self) -> Tensor:
        alpha, marginal, dtype = self.alpha, self.form.marginal, self.form.dtype
        result = self.sums["row_ga"]
        if marginal != "free":
            # The rounding of the baseline is removed as if every key had the weight of the best one.
            best = self.outputs["rest"].double() + float(self.centred)
            best = torch.where(best > 0, best, 1.0)
            change = (best - 1 - best * best.log()) / (alpha - 1) ** 2
            result = result - (self.sums["row_g"] - self.total) * change.to(dtype)
        if marginal == "sink":
            y = self.null_ratio.double()
            by_alpha = (1 - 1 / y - y.log()).to(dtype) / (alpha - 1) ** 2
            result = result + self.null_weight * self.null_advantage * by_alpha
        elif marginal != "rows":  # the kernel's sum is at a fixed lambda + tau/(alpha - 1)
            result = result + self.total / (alpha - 1) ** 2
        return result
