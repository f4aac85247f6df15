"""What was seen: sums per layer, head and position, from which means, tables and JSON follow.

Nothing here grows with the corpus. A layer keeps, for each bin of query positions, the sum of every channel over the
rows that fell into it, and their number; positions 0 to 15 have a bin each, then there are eight to the octave. Rows of
padding and rows without an admissible key are not counted, nor is a row in a channel that it has no value of. Means are
weighted by rows, maxima are maxima.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._validate import describe
from ..statistics import ROW_STATISTICS
from .findings import FORMAT, VERSION, Finding, Thresholds, find

if TYPE_CHECKING:
    import pandas

EXACT = 16  # positions with a bin of their own
PER_OCTAVE = 8

# Beside the statistics asked for: what every inspection keeps.
DERIVED = ("output_norm", "log_keys", "normalized_entropy")
PROFILES = ("entropy", "normalized_entropy", "kl", "score_variance", "max_weight", "first_key_mass", "output_norm")
# On request: mean weight on the query's own key, the one before it, and those that follow an earlier copy of its token.
PATTERNS = ("self_token", "previous_token", "induction")


def position_bins(positions: Tensor) -> Tensor:
    """The bin of each position (an integer tensor)."""
    octaves = (positions.clamp(min=EXACT).double() / EXACT).log2()
    beyond = EXACT + (octaves * PER_OCTAVE + 1e-9).floor().long()  # 2^k begins a bin, whatever log2 rounds to
    return torch.where(positions < EXACT, positions, beyond)


def bin_starts(bins: int) -> list[int]:
    """The first position of each bin, and of the one after the last."""
    starts = list(range(min(bins + 1, EXACT)))
    starts += [math.ceil(EXACT * 2 ** ((b - EXACT) / PER_OCTAVE) - 1e-9) for b in range(EXACT, bins + 1)]
    return starts


@dataclass(eq=False)
class Layer:
    """The sums of one attention module."""

    name: str
    index: int
    heads: int
    channels: tuple[str, ...]
    sums: Tensor  # [bins, C, H] float64
    counts: Tensor  # [bins, C, H], rows that have a value
    rows: Tensor  # [bins, H], all rows counted
    maxima: Tensor  # [C, H]
    key_sums: Tensor  # [bins, H], mass received, by the position of the key (empty: not asked for)
    key_viewers: Tensor  # [bins, H], queries that might have sent some
    calls: int = 0

    @classmethod
    def empty(cls, name: str, index: int, heads: int, channels: tuple[str, ...]) -> Layer:
        zeros = torch.zeros(0, heads, dtype=torch.float64)
        maxima = torch.full((len(channels), heads), -math.inf, dtype=torch.float64)
        sums = torch.zeros(0, len(channels), heads, dtype=torch.float64)
        return cls(name, index, heads, channels, sums, sums, zeros, maxima, zeros, zeros)

    def copy(self) -> Layer:
        """What is counted so far: sums are replaced, never changed in place, so this costs nothing."""
        return dataclasses.replace(self)

    def add(self, values: dict[str, Tensor], valid: Tensor, bins: Tensor) -> None:
        """Rows: values [B, H, Tq] by channel (NaN: no value), which rows count, and bins [B, Tq]."""
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
            setattr(self, name, _grown(getattr(self, name), size).index_add(0, where, amounts))
        flags = valid.permute(0, 2, 1).reshape(B * Tq, H).double().cpu()
        self.rows = _grown(self.rows, size).index_add(0, where, flags)
        if B * Tq:
            self.maxima = torch.maximum(self.maxima, highest.amax((1, 3)).double().cpu())
        self.calls += 1

    def add_keys(self, mass: Tensor, viewers: Tensor, bins: Tensor) -> None:
        """Mass received and queries that see the key, [B, H, Tk]; bins [B, Tk]."""
        B, H, Tk = mass.shape
        where = bins.expand(B, Tk).reshape(-1)
        size = int(where.max()) + 1 if where.numel() else 0
        for name, amounts in (("key_sums", mass), ("key_viewers", viewers.expand(B, H, Tk))):
            amounts = amounts.permute(0, 2, 1).reshape(B * Tk, H).double().cpu()
            setattr(self, name, _grown(getattr(self, name), size).index_add(0, where, amounts))

    def means(self) -> dict[str, Tensor]:
        """[H] by channel; NaN for a head of which no row was counted.

        `key_mass` is the largest mean weight on a key by position, over the queries that see it; positions seen by few
        (under a tenth of what the most visible one is seen by: the end of a causal text) do not compete.
        """
        means = self.sums.sum(0) / self.counts.sum(0)
        found = dict(zip(self.channels, means, strict=True))
        found["relative_norm"] = found["output_norm"] / found["output_norm"].mean()
        if len(self.key_sums):
            visible = self.key_viewers >= self.key_viewers.amax(0) / 10
            found["key_mass"] = (self.key_sums / self.key_viewers).nan_to_num(0.0).mul(visible).amax(0)
        return found

    def profile(self) -> dict[str, Tensor]:
        """[bins, H] by channel: the means of the rows at each position; NaN where there was none."""
        found = dict(zip(self.channels, (self.sums / self.counts).unbind(1), strict=True))
        if len(self.key_sums):
            found["key_mass"] = self.key_sums / self.key_viewers
        return found


def _grown(tensor: Tensor, size: int) -> Tensor:
    """With at least so many bins."""
    if len(tensor) >= size:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(size - len(tensor), *tensor.shape[1:])])


@dataclass(eq=False)
class Inspection:
    """The attention of a model over all that it was shown, by layer, head and position."""

    statistics: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)  # provenance: strings and numbers
    layers: list[Layer] = field(default_factory=list)
    batches: int = 0
    digest: str = ""  # of the batches shown so far, so that a resumed run is the same run
    patterns: bool = False  # whether PATTERNS were kept
    views: dict[str, Any] = field(default_factory=dict)  # of one sequence: "window", "top_keys", "paths" (views.py)

    @property
    def columns(self) -> tuple[str, ...]:
        """What each head has a mean of."""
        plain = tuple(name for name in self.statistics if name != "key_mass")
        last = ("key_mass",) if "key_mass" in self.statistics else ()
        return (*plain, *DERIVED, *(PATTERNS if self.patterns else ()), "relative_norm", *last)

    @property
    def rows(self) -> int:
        """Rows counted in the layer that saw most."""
        return int(max((float(layer.rows.sum(0).max()) for layer in self.layers if len(layer.rows)), default=0))

    def mean(self, name: str) -> Tensor:
        """[layers, heads] (NaN where a layer has fewer heads)."""
        if name not in self.columns:
            raise ValueError(f"name: expected one of {', '.join(self.columns)}, got {describe(name)}")
        return self._table([layer.means()[name] for layer in self.layers])

    def maximum(self, name: str) -> Tensor:
        """[layers, heads]: the largest value of any row."""
        if not self.layers or name not in self.layers[0].channels:
            raise ValueError(f"name: expected a statistic that was asked for, got {describe(name)}")
        return self._table([layer.maxima[layer.channels.index(name)] for layer in self.layers])

    def _table(self, heads: Sequence[Tensor]) -> Tensor:
        table = torch.full((len(heads), max(map(len, heads), default=0)), math.nan, dtype=torch.float64)
        for n, row in enumerate(heads):
            table[n, : len(row)] = row
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """One row per layer and head: layer, head, the means, and the largest score of all."""
        import pandas

        records = []
        for layer in self.layers:
            means = layer.means()
            if "max_scores" in layer.channels:
                means["max_scores_max"] = layer.maxima[layer.channels.index("max_scores")]
            columns = {name: value.tolist() for name, value in means.items()}
            records += [
                {"layer": layer.index, "head": head} | {name: values[head] for name, values in columns.items()}
                for head in range(layer.heads)
            ]
        tail = ("max_scores_max",) if "max_scores" in self.statistics else ()
        return pandas.DataFrame(records, columns=["layer", "head", *self.columns, *tail])

    def record(self, thresholds: Thresholds | None = None) -> dict[str, Any]:
        """Everything that the report shows, as plain numbers, lists and strings; what is not a number is None."""
        bins = max((len(layer.rows) for layer in self.layers), default=0)
        heads, null, profiles = [], [], {name: [] for name in PROFILES if name in self.columns}
        for layer in self.layers:
            means, profile, seen = layer.means(), layer.profile(), layer.rows.sum(0)
            for h in range(layer.heads):
                heads.append(
                    {
                        "layer": layer.index,
                        "head": h,
                        "rows": int(seen[h]),
                        "mean": {name: _number(values[h]) for name, values in means.items()},
                        "max": {name: _number(layer.maxima[n, h]) for n, name in enumerate(layer.channels)},
                    }
                )
                for name, found in (*profiles.items(), ("log_keys", null)):
                    own = profile[name][:, h]
                    found.append(_numbers(torch.cat([own, own.new_full((bins - len(own),), math.nan)])))
        rows = sum((_grown(layer.rows, bins).sum(1) for layer in self.layers), torch.zeros(bins, dtype=torch.float64))
        share = len(heads) or 1
        record = {
            "format": FORMAT,
            "version": VERSION,
            "provenance": self.about | {"batches": self.batches, "layers": len(self.layers)},
            "statistics": list(self.columns),
            "heads": heads,
            "positions": {
                "edges": bin_starts(bins),
                "rows": [round(n / share) for n in rows.tolist()],
                "null_entropy": null,  # by head: windows differ between layers
                "values": profiles,
            },
            **self.views,
        }
        return record | {"findings": [found.to_dict() for found in find(record, thresholds)]}

    def to_json(self, thresholds: Thresholds | None = None) -> str:
        """`record()` as JSON."""
        return json.dumps(self.record(thresholds), allow_nan=False)

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """What the named rules say of the heads, gravest first."""
        return find(self.record(), thresholds)

    def to_html(self, other: Inspection | None = None, thresholds: Thresholds | None = None) -> str:
        """The report: one page that needs nothing else, comparing this inspection with another if given."""
        from .report import to_html

        return to_html(self.record(thresholds), None if other is None else other.record(thresholds))

    def summary(self) -> str:
        """A few lines for a terminal: each layer's means over its heads, and the extremes."""
        shown = [
            n
            for n in ("entropy", "normalized_entropy", "max_weight", "first_key_mass", "max_scores")
            if n in self.columns
        ]
        name = self.about.get("model", "model")
        lines = [f"{name}: {len(self.layers)} attention layers, {self.rows} queries each"]
        widths = [max(len(n), 9) + 2 for n in shown]
        lines.append("layer  heads" + "".join(f"{n:>{w}}" for n, w in zip(shown, widths, strict=True)))
        for layer in self.layers:
            means = layer.means()
            values = (f"{float(means[n].nanmean()):>{w}.4g}" for n, w in zip(shown, widths, strict=True))
            lines.append(f"{layer.index:>5}{layer.heads:>7}{''.join(values)}")
        if "max_scores" in self.statistics and self.layers:
            lines.append(f"largest score: {float(self.maximum('max_scores').nan_to_num(-math.inf).max()):.4g}")
        return "\n".join(lines)

    # --- the run file: one safetensors file, its header carries the JSON ----------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one file (safetensors, no pickle); one of that name is replaced at once or not at all."""
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {
            f"{n}.{part}": getattr(layer, part).contiguous().clone()
            for n, layer in enumerate(self.layers)
            for part in _PARTS
        }
        tensors["version"] = torch.ones(1, dtype=torch.int64)
        header = {
            "about": self.about,
            "statistics": self.statistics,
            "batches": self.batches,
            "digest": self.digest,
            "patterns": self.patterns,
            "views": self.views,
            "layers": [[layer.name, layer.index, layer.heads, layer.channels, layer.calls] for layer in self.layers],
        }
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, metadata={"regard.inspection": json.dumps(header)})
        with part.open("rb") as written:
            os.fsync(written.fileno())  # its content before its name, also where the power fails
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Inspection:
        """What `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("regard.inspection", "null"))
                if header is None:
                    raise ValueError(f"path: expected a file written by Inspection.save, got {str(path)!r}")
                layers = []
                for n, (name, index, heads, channels, calls) in enumerate(header["layers"]):
                    tensors = {part: file.get_tensor(f"{n}.{part}") for part in _PARTS}
                    layers.append(Layer(name, index, heads, tuple(channels), calls=calls, **tensors))
            statistics = tuple(name for name in ROW_STATISTICS if name in header["statistics"])
            rest = (header[part] for part in ("batches", "digest", "patterns", "views"))
            return cls(statistics, header["about"], layers, *rest)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"path: expected a file written by Inspection.save, got {str(path)!r} ({error})") from None


_PARTS = ("sums", "counts", "rows", "maxima", "key_sums", "key_viewers")


def _number(value: float | Tensor) -> float | None:
    """To five digits; what JSON cannot say is None."""
    value = float(value)
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(tensor: Tensor) -> list[Any]:
    return [_number(value) for value in tensor.tolist()]
