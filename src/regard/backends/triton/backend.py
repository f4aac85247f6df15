"""Fused kernels for GPUs, written in Triton: O(T) memory, statistics in the pass, gradients without atomics.

The kernels are compiled for GPUs ahead of time and interpreted on the CPU in the tests. They have never run on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...form import Form
from ..base import READOUT, Backend
from ..row_gradient import PARAMETERS, RowGradient
from . import device_record, launch
from .gradients import from_pairs, row_terms
from .statistics import KL_GROUPS, LINK_GROUPS, STATISTICS, LinkRows, add_spread, centred_squares, statistics_kl

_PAIRS = 2**24  # single pairs that are held at once, where a gradient needs them
_DENSITY_LEAST = 2.0**-60  # stands for a density of 0 in a backward pass: dL/dpi is the sum of dL/dlog(pi), over pi
_SUMS = ("row_g", "row_gs", "row_gd", "row_ps", "row_pd", "row_gp", "row_ga")  # as kernels/backward.py stores them
_PRICE = ("dual", "peak", "rest")  # the plan can be computed again from these


class Triton(Backend):
    """backend="triton"."""

    name: ClassVar[str] = "triton"
    statistics: ClassVar[tuple[str, ...]] = STATISTICS
    rounds_cold_priors: ClassVar[bool] = True

    def unsupported(self, form: Form, names: tuple[str, ...]) -> str | None:
        assert form.query is not None and form.value is not None
        if not launch.installed():
            return "triton is not installed (pip install triton)"
        if not form.query.is_cuda and not (form.query.is_cpu and launch.interpreting()):
            return f"runs on GPUs only (query is on {form.query.device}; TRITON_INTERPRET=1 interprets it on the CPU)"
        if form.query.dtype == torch.float64:
            return "computes in float32 (got float64)"
        if max(form.query.shape[3], form.value.shape[3]) > launch.LARGEST_HEAD:
            return f"has heads of at most {launch.LARGEST_HEAD} (got {form.query.shape[3]}, {form.value.shape[3]})"
        if form.family not in ("kl", "tsallis", "fermi_dirac"):
            return "has kernels for KL, Tsallis and Fermi-Dirac only"
        if form.marginal not in launch.MARGINALS:
            return "solves rows only (regard.attention reduces rows and columns to rows)"
        if form.family == "fermi_dirac" and form.marginal not in ("rows", "free"):
            return "has Fermi-Dirac with plain rows and a free marginal only"
        if form.function is not None:
            return "has no kernel for a prior that is a function (regard.prior, regard.from_flex)"
        if form.hard:
            return "has no temperature 0"
        if form.first_query or form.first_key or form.first_batch or form.first_head:
            return "serves whole plans, not blocks of one"
        for name in names:
            if name not in ("out", READOUT) and name not in STATISTICS:
                return f"has no kernel for the statistic {name}"
        return None

    def unwise(self, form: Form, names: tuple[str, ...]) -> str | None:
        assert form.query is not None
        if os.environ.get("REGARD_TRITON") == "1":
            return None
        if not form.query.is_cuda:
            return 'interprets its kernels here, which is slow (REGARD_TRITON=1 lets "auto" use it)'
        reason = device_record.not_checked(form.query.device)
        return None if reason is None else f'{reason}; REGARD_TRITON=1 lets "auto" use it without'

    def saved(self, form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
        """The price, from which backward computes the plan again, and the terms of the baseline."""
        if form.family == "kl":
            return _PRICE
        centre = ("baseline_value",) if form.marginal != "free" else ()
        if "entropy" in names:
            centre += ("mass",) if form.marginal == "free" else ("baseline_log", "mass")
        return _PRICE + centre

    def saved_shapes(self, form: Form) -> dict[str, tuple[int, ...]]:
        assert form.query is not None and form.value is not None
        return {"baseline_value": (*form.query.shape[:3], form.value.shape[3])}

    # --- forward --------------------------------------------------------------------------------------------------

    def forward(self, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        assert form.query is not None
        if 0 in form.shape[:3]:
            shapes = self.output_shapes(form, names)
            return {n: torch.zeros(s, dtype=form.dtype, device=form.query.device) for n, s in shapes.items()}
        wanted = set(names)
        if "value_spread" in names:
            wanted |= {"out", "mass"}
        if "key_mass" in names:
            wanted |= {"peak", "rest"}
        centre, squares = centred_squares(form) if "value_spread" in names else (None, None)
        forward = self._forward_kl if form.family == "kl" else self._forward_link
        found = forward(form, wanted, squares)
        if centre is not None:
            out = found["out"]
            if form.dropout_key is not None:  # the spread is defined by the output before dropout
                plain = dataclasses.replace(form, dropout_p=0.0, dropout_key=None)
                out = forward(plain, {"out", "value_spread"}, squares)["out"]
            found["value_spread"] = add_spread(form, found["value_spread"], out, centre, found["mass"])
        if "key_mass" in names:
            found["key_mass"] = self._empty(form, (*form.shape[:2], form.shape[3]))
            self._by_columns(form, {"key_mass": found["key_mass"]}, found)
        return {name: found[name] for name in names}

    def _empty(self, form: Form, shape: tuple[int, ...]) -> Tensor:
        assert form.query is not None
        return torch.empty(shape, dtype=form.dtype, device=form.query.device)

    def _forward_kl(self, form: Form, names: set[str], squares: Tensor | None) -> dict[str, Tensor]:
        rows = form.shape[:3]
        wanted = names & KL_GROUPS.keys() - {"lse"}
        groups = {group for name in wanted for group in KL_GROUPS[name]}
        found = {n: self._empty(form, rows) for n in ("peak", "rest", "lse") if n in names or n != "lse"}
        if "out" in names:
            found["out"] = self._empty(form, self.output_shapes(form, ("out",))["out"])
        sums = self._empty(form, (14, *rows)).zero_() if wanted else None
        launch.run(
            form, "forward_kl", "forward_kl", self._record(form), found.get("out"), found["peak"], found["rest"],
            found.get("lse"), sums, squares, MARGINAL=form.marginal, RISING=form.scale >= 0,
            MOMENTS="moments" in groups, SQUARES="squares" in groups, SCORES="scores" in groups and form.weighted,
            COUNTS="counts" in groups, PRIOR="prior" in groups,
            SPREAD="spread" in groups, **launch.options(form),
        )  # fmt: skip
        return found if sums is None else found | statistics_kl(form, sums, wanted)

    def _forward_link(self, form: Form, names: set[str], squares: Tensor | None) -> dict[str, Tensor]:
        rows = form.shape[:3]
        wanted = names & LINK_GROUPS.keys()
        groups = {group for name in wanted for group in LINK_GROUPS[name]}
        record = self._record(form)
        options = launch.options(form) | launch.link_options(form) | {"MARGINAL": form.marginal}
        peak, rest = self._empty(form, rows), self._empty(form, rows)
        if form.marginal != "free":
            launch.run(form, "search", "find_price", record, peak, rest, None, **options)
        shape = self.output_shapes(form, ("out",))["out"]
        out = self._empty(form, shape) if names & {"out", "baseline_value"} else None
        baseline = self._empty(form, shape) if "baseline_value" in names else None
        sums = self._empty(form, (17, *rows)).zero_()
        launch.run(
            form, "forward_link", "forward_link", record, peak, rest, out, baseline, sums, squares,
            LOGS="logs" in groups or "baseline_log" in names, SCORES="scores" in groups, COUNTS="counts" in groups,
            VALUE="value" in groups, SPREAD="spread" in groups, TOP="top" in groups, **options,
        )  # fmt: skip
        solved = LinkRows(form, sums, peak, rest, launch.centred(form))
        found = {"peak": peak, "rest": rest} | solved.statistics(wanted)
        if out is not None:
            found["out"] = out * solved.share[..., None]
        if baseline is not None:
            found["baseline_value"] = baseline * solved.baseline_share[..., None]
        if "baseline_log" in names:
            found["baseline_log"] = solved.baseline_log(solved.entropy())
        return found

    def _record(self, form: Form, density_least: float = 0.0) -> Any:
        """The record of a form. Keys that no query may read are found first, because they may hold NaN."""
        if density_least and form.density is not None:
            form = form.with_tensors({"density": form.density.clamp(min=density_least)})
        if launch.reads_every_key(form):
            return launch.record(form, None)
        assert form.key is not None
        B, Hkv, Tk = form.key.shape[:3]
        found = torch.ones((B, Hkv, 1, Tk), dtype=torch.uint8, device=form.key.device)
        record, options = launch.record(form, None), launch.options(form)
        band = {name: options[name] for name in ("LEFT", "RIGHT")}
        launch.run_by_key(form, "find_readable", record, found, **band)
        return launch.record(form, found)

    # --- backward -------------------------------------------------------------------------------------------------

    def backward(
        self, form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The kernels compute dQ, dK, dV and sums per row and key; other gradients are computed from these sums."""
        tensors = form.tensors()
        B, H, Tq, Tk = form.shape
        if 0 in (B, H, Tq):
            return {slot: torch.zeros_like(tensors[slot]) for slot in needed}
        if form.family == "kl" and form.marginal == "free" and "lse" not in outputs and {"entropy", "lse"} & set(grads):
            outputs = outputs | self.forward(form, ("lse",))
        terms = row_terms(form, outputs, grads)
        device = tensors["query"].device
        sums: dict[str, Tensor] = {"row_dot": terms.dot}
        results: dict[str, Tensor] = {}
        parameters = [slot for slot in needed if slot in PARAMETERS]
        summed = bool(parameters) or "decay_query" in needed
        if summed or "query" in needed:
            found = torch.empty((len(_SUMS), B, H, Tq), dtype=form.dtype, device=device) if summed else None
            dq = torch.empty(tensors["query"].shape, dtype=form.dtype, device=device) if "query" in needed else None
            self._by_rows(form, dq, found, terms, outputs, grads)
            if found is not None:
                sums |= dict(zip(_SUMS, found, strict=True))
            if dq is not None:
                results["query"] = dq
        by_key = {"key": "dk", "value": "dv", "decay_key": "key_g"}
        fields = {
            by_key[slot]: torch.zeros(
                tensors[slot].shape if slot in ("key", "value") else (B, H, Tk), dtype=form.dtype, device=device
            )
            for slot in needed
            if slot in by_key
        }
        if fields:
            self._by_columns(form, fields, outputs, terms, grads)
        for slot, field in by_key.items():
            if slot in needed:
                results[slot] = fields[field] if slot != "decay_key" else -fields[field][:, :, None]
        rows = RowGradient(form, sums, outputs, grads, launch.centred(form)) if parameters else None
        for slot in parameters:
            assert rows is not None
            results[slot] = rows.of(slot)
        if "decay_query" in needed:
            results["decay_query"] = sums["row_gp"][..., None]
        dense = [slot for slot in needed if slot not in results]
        if dense:
            results |= self._by_pairs(form, dense, outputs, grads, terms)
        return {slot: results[slot].sum_to_size(tensors[slot].shape).to(tensors[slot].dtype) for slot in needed}

    def _options(self, form: Form, grads: dict[str, Tensor]) -> dict[str, Any]:
        return launch.options(form) | launch.link_options(form) | {"ENTROPY": "entropy" in grads}

    def _by_rows(
        self,
        form: Form,
        dq: Tensor | None,
        sums: Tensor | None,
        terms: Any,
        outputs: dict[str, Tensor],
        grads: dict[str, Tensor],
    ) -> None:
        launch.run(
            form, "backward", "by_rows", self._record(form), launch.operand(grads.get("out")), outputs["peak"],
            outputs["rest"], terms.a, terms.b, outputs["dual"], dq, sums, SUMS=sums is not None,
            **self._options(form, grads),
        )  # fmt: skip

    def _by_columns(
        self,
        form: Form,
        fields: dict[str, Tensor],
        outputs: dict[str, Any],
        terms: Any = None,
        grads: dict[str, Tensor] | None = None,
    ) -> None:
        launch.run_by_key(
            form, "by_columns", self._record(form), launch.operand((grads or {}).get("out")), outputs["peak"],
            outputs["rest"], None if terms is None else terms.a, None if terms is None else terms.b, fields.get("dk"),
            fields.get("dv"), fields.get("key_g"), fields.get("key_mass"), **self._options(form, grads or {}),
        )  # fmt: skip

    def _by_pairs(
        self, form: Form, slots: list[str], outputs: dict[str, Tensor], grads: dict[str, Tensor], terms: Any
    ) -> dict[str, Tensor]:
        """Gradients of slots that need single pairs: blocks of queries, each reduced before the next is computed."""
        B, H, Tq, Tk = form.shape
        assert form.query is not None
        results: dict[str, Tensor] = {}
        step = max(1, min(Tq, _PAIRS // max(1, B * H * Tk)))
        for slot in slots:
            least = _DENSITY_LEAST if slot == "density" else 0.0
            record = self._record(form, least)
            for first in range(0, Tq, step):
                n = min(step, Tq - first)
                pairs = self._pairs(form, record, first, n, outputs, terms, grads, slot == "score_bias")
                from_pairs(form, slot, pairs, first, results)
            if slot == "density":
                assert form.density is not None
                results[slot] = results[slot] / form.density.clamp(min=_DENSITY_LEAST)
        return results

    def _pairs(
        self, form: Form, record: Any, first: int, n: int, outputs: dict[str, Any], terms: Any = None,
        grads: dict[str, Tensor] | None = None, as_score: bool = False,
    ) -> Tensor:  # fmt: skip
        """Single pairs of n queries, [B, H, n, Tk]: G or dL/ds, and without `terms` the plan."""
        B, H, _, Tk = form.shape
        assert form.query is not None
        pairs = torch.zeros((B, H, n, Tk), dtype=form.dtype, device=form.query.device)
        options = {name: value for name, value in self._options(form, grads or {}).items() if name != "PARTS"}
        launch.run_pairs(
            form, n, record, launch.operand((grads or {}).get("out")), outputs["peak"], outputs["rest"],
            None if terms is None else terms.a, None if terms is None else terms.b, pairs, first, n,
            AS_SCORE=as_score, AS_PLAN=terms is None, **options,
        )  # fmt: skip
        return pairs

    # --- reading single weights -----------------------------------------------------------------------------------

    def _plan(self, form: Form) -> Iterator[tuple[int, int, Tensor]]:
        """The plan by blocks of queries: the first query, their number, and weights [B, H, n, Tk]."""
        B, H, Tq, Tk = form.shape
        assert form.key is not None
        form = dataclasses.replace(form, value=form.key[..., :1])  # no output is needed
        price = self.forward(form, ("peak", "rest"))
        record, step = self._record(form), max(1, min(Tq, _PAIRS // max(1, B * H * Tk)))
        for first in range(0, max(1, Tq), step):  # one empty block if there is no query
            n = min(step, Tq - first)
            yield first, n, self._pairs(form, record, first, n, price)

    def topk(self, form: Form, n: int) -> tuple[Tensor, Tensor]:
        parts = [weights.topk(n, -1) for _, _, weights in self._plan(form)]
        return torch.cat([part.values for part in parts], 2), torch.cat([part.indices for part in parts], 2)

    def weights_at(self, form: Form, index: Tensor) -> Tensor:
        return torch.cat([w.gather(-1, index[:, :, first : first + n]) for first, n, w in self._plan(form)], 2)

    def block_sums(self, form: Form, block: int) -> Tensor:
        B, H, Tq, Tk = form.shape
        columns = -(-Tk // block)
        sums = self._empty(form, (B, H, -(-Tq // block), columns)).zero_()
        for first, n, weights in self._plan(form):
            by_key = torch.nn.functional.pad(weights, (0, columns * block - Tk)).unflatten(-1, (columns, block)).sum(-1)
            for row in range(first // block, (first + n - 1) // block + 1):  # in a fixed order: no atomics
                part = by_key[:, :, max(0, row * block - first) : (row + 1) * block - first]
                sums[:, :, row] += part.sum(2)
        return sums
