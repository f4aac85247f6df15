"""`Inspection`: what was recorded, as tables, JSON, findings, the report and a run file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._display import html_table
from .._validate import describe
from . import run_file
from .findings import FORMAT, VERSION, find, verdict
from .head_rules import Thresholds
from .layers import DERIVED, PATTERNS, Layer, bin_starts, with_bins
from .numbers import count_of, json_number, json_numbers
from .report import to_html
from .rules import Finding
from .run_file import Partial

if TYPE_CHECKING:
    import pandas

# The statistics that the report shows by position.
PROFILES = ("entropy", "normalized_entropy", "kl", "score_variance", "max_weight", "first_key_mass", "output_norm")


@dataclass(eq=False, repr=False)
class Inspection:
    """The attention of a model over all its inputs, by layer, head and position."""

    statistics: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)  # provenance: strings and numbers
    layers: list[Layer] = field(default_factory=list)
    batches: int = 0
    digest: str = ""  # of the batches so far: a resumed run must have the same inputs
    patterns: bool = False  # whether the channels PATTERNS were recorded
    views: dict[str, Any] = field(default_factory=dict)  # of one sequence: "window", "top_keys", ... (views.py)
    partial: Partial | None = None  # the batch under way, in a run file (run_file.py)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the means that each head has."""
        plain = tuple(name for name in self.statistics if name != "key_mass")
        last = ("key_mass",) if "key_mass" in self.statistics else ()
        return (*plain, *DERIVED, *(PATTERNS if self.patterns else ()), "relative_norm", *last)

    @property
    def rows(self) -> int:
        """The number of counted rows, in the layer that has the most."""
        return int(max((float(layer.rows.sum(0).max()) for layer in self.layers if len(layer.rows)), default=0))

    def mean(self, name: str) -> Tensor:
        """[layers, heads]: the mean over rows (NaN where a layer has fewer heads)."""
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
        """One row per layer and head: layer, head, the means, and the largest score."""
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
        """Everything that the report shows, as numbers, lists and strings; None in place of NaN and infinities."""
        bins = max((len(layer.rows) for layer in self.layers), default=0)
        heads, null, profiles = [], [], {name: [] for name in PROFILES if name in self.columns}
        for layer in self.layers:
            means, profile, seen, lost = layer.means(), layer.profile(), layer.rows.sum(0), layer.not_finite()
            for h in range(layer.heads):
                heads.append(
                    {
                        "layer": layer.index,
                        "head": h,
                        "rows": int(seen[h]),
                        "not_finite": int(lost[h]),
                        "mean": {name: json_number(values[h]) for name, values in means.items()},
                        "max": {name: json_number(layer.maxima[n, h]) for n, name in enumerate(layer.channels)},
                    }
                )
                for name, found in (*profiles.items(), ("log_keys", null)):
                    own = profile[name][:, h]
                    found.append(json_numbers(torch.cat([own, own.new_full((bins - len(own),), math.nan)])))
        rows = sum(
            (with_bins(layer.rows, bins).sum(1) for layer in self.layers), torch.zeros(bins, dtype=torch.float64)
        )
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
        """What the named rules find in the heads, the most severe first."""
        return find(self.record(), thresholds)

    def to_html(self, other: Inspection | None = None, thresholds: Thresholds | None = None) -> str:
        """The report as one HTML page that loads nothing else. With `other` it compares the two inspections."""
        return to_html(self.record(thresholds), None if other is None else other.record(thresholds))

    def summary(self) -> str:
        """A few lines for a terminal: the means of each layer over its heads, and the largest score."""
        names, rows = self._means_by_layer()
        widths = [max(len(name), 9) + 2 for name in names]
        lines = [self._title(), "layer  heads" + "".join(f"{n:>{w}}" for n, w in zip(names, widths, strict=True))]
        for index, heads, *means in rows:
            values = (f"{value:>{w}.4g}" for value, w in zip(means, widths, strict=True))
            lines.append(f"{index:>5}{heads:>7}{''.join(values)}")
        return "\n".join([*lines, *self._largest_score()])

    def __repr__(self) -> str:
        heads = sum(layer.heads for layer in self.layers)
        sizes = f"layers={len(self.layers)}, heads={heads}, rows={self.rows}, statistics={len(self.statistics)}"
        begun = "" if self.partial is None else f", under way: {count_of(self.partial.calls, 'layer')} of a batch"
        return f"Inspection({self.about.get('model', 'model')}, {sizes}{begun})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict of the rules, and `summary` as a table."""
        names, rows = self._means_by_layer()
        if not rows:
            return html_table(self._title(), [], notes=["Nothing was recorded."])
        record = self.record()
        found = [Finding(**entry) for entry in record["findings"]]
        notes = [verdict(record, found), *self._largest_score()]
        return html_table(self._title(), rows, ("layer", "heads", *names), notes)

    def _title(self) -> str:
        layers = count_of(len(self.layers), "attention layer")
        return f"{self.about.get('model', 'model')}: {layers}, {self.rows} queries each"

    def _means_by_layer(self) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The names of some statistics, and of each layer its number, its heads and their means over the heads."""
        shown = ("entropy", "normalized_entropy", "max_weight", "first_key_mass", "max_scores")
        names = [name for name in shown if name in self.columns]
        rows = []
        for layer in self.layers:
            means = layer.means()
            rows.append((layer.index, layer.heads, *(float(means[name].nanmean()) for name in names)))
        return names, rows

    def _largest_score(self) -> list[str]:
        if "max_scores" not in self.statistics or not self.layers:
            return []
        return [f"largest score: {float(self.maximum('max_scores').nan_to_num(-math.inf).max()):.4g}"]

    # --- the run file -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one file (safetensors, no pickle). An existing file is replaced in one step, or kept."""
        run_file.write(path, vars(self))

    @classmethod
    def load(cls, path: str | Path) -> Inspection:
        """Read a file that `save` wrote."""
        return cls(**run_file.read(path))
