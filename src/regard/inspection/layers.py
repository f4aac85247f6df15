"""`Layer`: what one attention did, as sums by head and position bin.

The memory does not grow with the corpus. For each bin of query positions a layer keeps the sum of every channel over
the rows in the bin, and their number. Positions 0 to 15 have a bin each; after that there are eight bins per octave.
Rows of padding and rows without an admissible key are not counted, and a row is not counted in a channel in which it
has no value. Means are weighted by rows.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._display import Displayed

EXACT = 16  # positions with a bin of their own
PER_OCTAVE = 8

# Channels of every inspection, beside the statistics that were asked for.
DERIVED = ("output_norm", "log_keys", "normalized_entropy")
# On request: the mean weight on the query's own key, on the key before it, and on the keys that follow an earlier copy
# of its token.
PATTERNS = ("self_token", "previous_token", "induction")

PARTS = ("sums", "counts", "rows", "maxima", "key_sums", "key_viewers")  # the tensors of a layer, for files


def derived_channels(out: Tensor, entropy: Tensor, log_keys: Tensor) -> dict[str, Tensor]:
    """The channels DERIVED of one call, [B, H, Tq] each, from its output [B, H, Tq, Dv], its entropies and the
    logarithm of the number of keys of each row."""
    norm = out.float().norm(dim=-1)
    return {
        "output_norm": torch.where(norm.isfinite(), norm, torch.nan),
        "log_keys": log_keys,
        "normalized_entropy": torch.where(log_keys > 0, entropy / log_keys, torch.nan),
    }


def position_bins(positions: Tensor) -> Tensor:
    """The bin of each position (an integer tensor)."""
    octaves = (positions.clamp(min=EXACT).double() / EXACT).log2()
    beyond = EXACT + (octaves * PER_OCTAVE + 1e-9).floor().long()  # 2^k begins a bin, however log2 rounds
    return torch.where(positions < EXACT, positions, beyond)


def bin_starts(bins: int) -> list[int]:
    """The first position of each bin, and that of the bin after the last."""
    starts = list(range(min(bins + 1, EXACT)))
    starts += [math.ceil(EXACT * 2 ** ((b - EXACT) / PER_OCTAVE) - 1e-9) for b in range(EXACT, bins + 1)]
    return starts


def nth_call(name: str, n: int) -> str:
    """The name of the layer that is the n-th call (from 1) of a module in one pass: layers may share their weights."""
    return name if n == 1 else f"{name} (call {n})"


@dataclass(eq=False, repr=False)
class Layer(Displayed):
    """The sums of one attention: a module, or one of its calls if a pass calls it several times."""

    name: str
    index: int
    heads: int
    channels: tuple[str, ...]
    sums: Tensor  # [bins, C, H] float64
    counts: Tensor  # [bins, C, H], number of rows with a value
    rows: Tensor  # [bins, H], number of all counted rows
    maxima: Tensor  # [C, H]
    key_sums: Tensor  # [bins, H], mass received, by position of the key (no bins: key_mass was not asked for)
    key_viewers: Tensor  # [bins, H], number of queries that see the key
    calls: int = 0

    @classmethod
    def empty(cls, name: str, index: int, heads: int, channels: tuple[str, ...]) -> Layer:
        zeros = torch.zeros(0, heads, dtype=torch.float64)
        maxima = torch.full((len(channels), heads), -math.inf, dtype=torch.float64)
        sums = torch.zeros(0, len(channels), heads, dtype=torch.float64)
        return cls(name, index, heads, channels, sums, sums, zeros, maxima, zeros, zeros)

    def copy(self) -> Layer:
        """The sums so far. The tensors are shared: `add` replaces them and never changes them in place."""
        return dataclasses.replace(self)

    def add(self, values: dict[str, Tensor], valid: Tensor, bins: Tensor) -> None:
        """Add rows: values [B, H, Tq] by channel (NaN: no value), which rows count [B, H, Tq], and bins [B|1, Tq]."""
        B, H, Tq = valid.shape
        if self.heads != H or tuple(values) != self.channels:
            raise ValueError(
                f"{self.name}: expected {self.heads} heads and {self.channels}, got {H} and {tuple(values)}"
            )
        stacked = torch.stack([values[c] for c in self.channels])  # [C, B, H, Tq]
        present = valid & ~stacked.isnan()
        highest = torch.where(present, stacked, -math.inf)
        where = bins.expand(B, Tq).reshape(-1)
        size = int(where.max()) + 1 if where.numel() else 0
        for name, amounts in (("sums", torch.where(present, stacked, 0.0)), ("counts", present)):
            amounts = amounts.permute(1, 3, 0, 2).reshape(B * Tq, -1, H).double().cpu()
            setattr(self, name, with_bins(getattr(self, name), size).index_add(0, where, amounts))
        flags = valid.permute(0, 2, 1).reshape(B * Tq, H).double().cpu()
        self.rows = with_bins(self.rows, size).index_add(0, where, flags)
        if B * Tq:
            self.maxima = torch.maximum(self.maxima, highest.amax((1, 3)).double().cpu())
        self.calls += 1

    def add_keys(self, mass: Tensor, viewers: Tensor, bins: Tensor) -> None:
        """Add keys: the mass that each received and the number of queries that see it, [B, H, Tk]; bins [B|1, Tk]."""
        B, H, Tk = mass.shape
        where = bins.expand(B, Tk).reshape(-1)
        size = int(where.max()) + 1 if where.numel() else 0
        for name, amounts in (("key_sums", mass), ("key_viewers", viewers.expand(B, H, Tk))):
            amounts = amounts.permute(0, 2, 1).reshape(B * Tk, H).double().cpu()
            setattr(self, name, with_bins(getattr(self, name), size).index_add(0, where, amounts))

    def not_finite(self) -> Tensor:
        """[H]: the number of rows whose output is NaN or infinite."""
        return self.rows.sum(0) - self.counts.sum(0)[self.channels.index("output_norm")]

    def means(self) -> dict[str, Tensor]:
        """[H] by channel; NaN for a head without a counted row.

        `key_mass` is the largest mean weight on a key, by position, over the queries that see it. Positions that few
        queries see (less than a tenth of the most visible one, such as the end of a causal text) are left out.
        """
        means = self.sums.sum(0) / self.counts.sum(0)
        found = dict(zip(self.channels, means, strict=True))
        found["relative_norm"] = found["output_norm"] / found["output_norm"].mean()
        if len(self.key_sums):
            visible = self.key_viewers >= self.key_viewers.amax(0) / 10
            found["key_mass"] = (self.key_sums / self.key_viewers).nan_to_num(0.0).mul(visible).amax(0)
        return found

    def profile(self) -> dict[str, Tensor]:
        """[bins, H] by channel: the mean over the rows at each position; NaN where there are none."""
        found = dict(zip(self.channels, (self.sums / self.counts).unbind(1), strict=True))
        if len(self.key_sums):
            found["key_mass"] = self.key_sums / self.key_viewers
        return found


def with_bins(tensor: Tensor, bins: int) -> Tensor:
    """The tensor, extended by zeros to at least this many bins."""
    if len(tensor) >= bins:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(bins - len(tensor), *tensor.shape[1:])])
