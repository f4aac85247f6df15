"""What was seen: sums per layer, head and position, from which means, tables and JSON follow.

Nothing here grows with the corpus. A layer keeps, for each bin of query positions, the sum of every channel over the
rows that fell into it; positions 0 to 15 have a bin each, then there are eight to the octave. Rows of padding and rows
without an admissible key are not counted. Means are weighted by rows, maxima are maxima.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..parts import describe
from ..statistics import NAMES

if TYPE_CHECKING:
    import pandas

EXACT = 16  # positions with a bin of their own
PER_OCTAVE = 8

# Beside the statistics asked for: what every inspection keeps.
DERIVED = ("output_norm", "log_keys", "entropy_norm")


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
    rows: Tensor  # [bins, H], rows counted
    ratio_rows: Tensor  # [bins, H], rows with more than one key: entropy_norm is defined there
    maxima: Tensor  # [C, H]
    key_sums: Tensor  # [bins, H], mass received, by the position of the key (empty: not asked for)
    key_viewers: Tensor  # [bins, H], queries that might have sent some
    calls: int = 0

    @classmethod
    def empty(cls, name: str, index: int, heads: int, channels: tuple[str, ...]) -> Layer:
        zeros = torch.zeros(0, heads, dtype=torch.float64)
        maxima = torch.full((len(channels), heads), -math.inf, dtype=torch.float64)
        sums = torch.zeros(0, len(channels), heads, dtype=torch.float64)
        return cls(name, index, heads, channels, sums, zeros, zeros, maxima, zeros, zeros)

    def copy(self) -> Layer:
        """What is counted so far: sums are replaced, never changed in place, so this costs nothing."""
        return dataclasses.replace(self)

    def add(self, values: dict[str, Tensor], valid: Tensor, ratio: Tensor, bins: Tensor) -> None:
        """Rows: values [B, H, Tq] by channel, which of them count, where entropy_norm is defined (0 elsewhere), and
        bins [B, Tq]."""
        B, H, Tq = valid.shape
        if self.heads != H or tuple(values) != self.channels:
            raise ValueError(
                f"{self.name}: expected {self.heads} heads and {self.channels}, got {H} and {tuple(values)}"
            )
        stacked = torch.stack([values[c] for c in self.channels])  # [C, B, H, Tq]
        counted, highest = stacked, stacked
        if not bool(valid.all()):
            counted, highest = torch.where(valid, stacked, 0.0), torch.where(valid, stacked, -math.inf)
        where = bins.expand(B, Tq).reshape(-1)
        size = int(where.max()) + 1 if where.numel() else 0
        rows = counted.permute(1, 3, 0, 2).reshape(B * Tq, -1, H).double()
        self.sums = _grown(self.sums, size).index_add(0, where, rows.cpu())
        for name, flags in (("rows", valid), ("ratio_rows", valid & ratio)):
            flags = flags.permute(0, 2, 1).reshape(B * Tq, H).double().cpu()
            setattr(self, name, _grown(getattr(self, name), size).index_add(0, where, flags))
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
        rows, ratio_rows, sums = self.rows.sum(0), self.ratio_rows.sum(0), self.sums.sum(0)
        found = {c: sums[n] / (ratio_rows if c == "entropy_norm" else rows) for n, c in enumerate(self.channels)}
        found["relative_output_norm"] = found["output_norm"] / found["output_norm"].mean()
        if len(self.key_sums):
            visible = self.key_viewers >= self.key_viewers.amax(0) / 10
            found["key_mass"] = (self.key_sums / self.key_viewers).nan_to_num(0.0).mul(visible).amax(0)
        return found

    def profile(self) -> dict[str, Tensor]:
        """[bins, H] by channel: the means of the rows at each position; NaN where there was none."""
        found = {
            c: self.sums[:, n] / (self.ratio_rows if c == "entropy_norm" else self.rows)
            for n, c in enumerate(self.channels)
        }
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

    @property
    def columns(self) -> tuple[str, ...]:
        """What each head has a mean of."""
        plain = tuple(name for name in self.statistics if name != "key_mass")
        return (*plain, *DERIVED, "relative_output_norm", *(("key_mass",) if "key_mass" in self.statistics else ()))

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

    def to_json(self) -> str:
        """Everything that was kept, as JSON; what is not a number is null."""
        bins = max((max(len(layer.rows), len(layer.key_sums)) for layer in self.layers), default=0)
        return json.dumps(
            {
                "format": "regard.inspection",
                "version": 1,
                "about": self.about,
                "statistics": list(self.statistics),
                "columns": list(self.columns),
                "batches": self.batches,
                "rows": self.rows,
                "positions": bin_starts(bins),
                "layers": [
                    {
                        "layer": layer.index,
                        "name": layer.name,
                        "heads": layer.heads,
                        "calls": layer.calls,
                        "rows": _numbers(layer.rows.sum(0)),
                        "mean": {name: _numbers(value) for name, value in layer.means().items()},
                        "max": {c: _numbers(layer.maxima[n]) for n, c in enumerate(layer.channels)},
                        "profile_rows": _numbers(layer.rows.mT),
                        "profile": {name: _numbers(value.mT) for name, value in layer.profile().items()},
                    }
                    for layer in self.layers
                ],
            },
            allow_nan=False,
        )

    def summary(self) -> str:
        """A few lines for a terminal: each layer's means over its heads, and the extremes."""
        shown = [
            n for n in ("entropy", "entropy_norm", "max_weight", "first_key_mass", "max_scores") if n in self.columns
        ]
        name = self.about.get("model", "model")
        lines = [f"{name}: {len(self.layers)} attention layers, {self.rows} queries each, {self.batches} batches"]
        lines.append("layer  heads" + "".join(f"{n:>16}" for n in shown))
        for layer in self.layers:
            means = layer.means()
            values = "".join(f"{float(means[n].nanmean()):>16.4g}" for n in shown)
            lines.append(f"{layer.index:>5}{layer.heads:>7}{values}")
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
            "layers": [[layer.name, layer.index, layer.heads, layer.channels, layer.calls] for layer in self.layers],
        }
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, metadata={"regard.inspection": json.dumps(header)})
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
        except SafetensorError as error:
            raise ValueError(f"path: expected a file written by Inspection.save, got {str(path)!r} ({error})") from None
        statistics = tuple(name for name in NAMES if name in header["statistics"])
        return cls(statistics, header["about"], layers, header["batches"], header["digest"])


_PARTS = ("sums", "rows", "ratio_rows", "maxima", "key_sums", "key_viewers")


def _numbers(tensor: Tensor) -> list[Any]:
    """As nested lists; what JSON cannot say is None."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(v) for v in value]
        return value if math.isfinite(value) else None

    return clean(tensor.tolist())
