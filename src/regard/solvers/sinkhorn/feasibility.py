"""Proofs that a problem has no plan: queries that may read certain keys only and send more than these may receive."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .stage import Stage, State
from .views import one_sided, with_prices_as_feature

FIRST = 4  # test the state at iterations 4, 8, 16, ...


class Infeasibility:
    """Collects proofs while a solver iterates. `heads` [B, H] have no plan, and `reason` describes the first proof."""

    def __init__(self, stage: Stage) -> None:
        form, marginals = stage.form, stage.marginals
        self.heads = torch.zeros(form.shape[:2], dtype=torch.bool, device=marginals.row.device)
        self.reason = ""
        # A problem without masks has a plan: within a document every query may send something to every key.
        masks = dataclasses.replace(form, query_ids=None, key_ids=None)
        self.possible = marginals.balanced and masks.has_prior

    def look(self, stage: Stage, state: State, number: int, tolerance: float, arrived: Tensor) -> Tensor:
        """The heads proven to have no plan. Tests the state of iteration `number` if a test is due."""
        due = number >= FIRST and number.bit_count() == 1
        if self.possible and due and not bool((arrived | self.heads).all()):
            excess = state.residual / torch.where(stage.marginals.live, state.target, 1.0)
            for order in (state.gamma, excess.nan_to_num(0.0)):
                self._test_order(stage, order, tolerance)
        return self.heads

    def _test_order(self, stage: Stage, order: Tensor, tolerance: float) -> None:
        """Try the k highest keys of an order [B, H, Tk] as the set that is too small, for every k at once.

        Where there is no plan, Sinkhorn's steps overfill such keys, and their prices grow without bound. A query is
        confined to the first k keys if the last key that it may read is among them. The test is exact for any order."""
        marginals = stage.marginals
        form, zeros = stage.form.without_scores(), torch.zeros_like(marginals.column)
        form = dataclasses.replace(one_sided(form, zeros, marginals.live), scale=1.0, temperature=1.0)
        keys = torch.where(marginals.live, order, -math.inf).argsort(-1, descending=True)  # [B, H, Tk]
        rank = keys.argsort(-1)
        ranked = with_prices_as_feature(form, -rank.double())  # the score of a key is its rank
        last = stage.engine.forward(ranked, ("max_scores",))["max_scores"]  # [B, H, Tq]
        last = last.nan_to_num(nan=keys.shape[-1] - 1).clamp(min=0).round().long()  # NaN: not confined
        sent = zeros.scatter_add(-1, last, marginals.row).cumsum(-1)  # by the queries confined to the first k keys
        received = marginals.column.gather(-1, keys).cumsum(-1)
        over, most = (sent - received).max(-1)
        proved = over > max(tolerance, 1e-6) * marginals.row.sum(-1)
        if not self.reason and bool(proved.any()):
            b, h = (int(n) for n in proved.nonzero()[0])
            k = int(most[b, h])
            confined = int((stage.queries[b, h] & (last[b, h] <= k)).sum())
            self.reason = (
                f"there is no plan: in head {h} of batch {b}, {confined} queries send {float(sent[b, h, k]):.6g} "
                f"and may read only {k + 1} keys, which are to receive {float(received[b, h, k]):.6g}"
            )
        self.heads = self.heads | proved
