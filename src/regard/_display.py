"""How results show themselves: a short `repr`, and a small table in a notebook.

`Displayed` is the base of dataclasses that hold tensors. Their `repr` has the shape and the dtype of each tensor, not
its numbers. `html_table` makes the table that a notebook shows. It has no colours of its own: the text inherits the
colour of the page and the lines are a half-transparent grey, so it is readable in light and dark themes. All text is
escaped.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ._validate import concrete, describe

_FONT = "font-size:13px;line-height:1.4"
_CELL = "padding:2px 14px 2px 0;border:0;vertical-align:top;max-width:60em"
_LINE = "border-bottom:1px solid rgba(128,128,128,.5)"
_COLUMNS = ("", "dtype", "shape", "lowest", "mean", "highest")


class Displayed:
    """Base of dataclasses that hold results. Declare them with `repr=False`."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={describe(value)}" for name, value in _given(self))
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        rows = [
            (name, *_of_tensor(value)) if isinstance(value, Tensor) else (name, describe(value))
            for name, value in _given(self)
        ]
        return html_table(type(self).__name__, rows, _COLUMNS)


def html_table(
    title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = (), notes: Iterable[str] = ()
) -> str:
    """A title, lines of text below it (`notes`) and a table.

    A number is shown with four digits and aligned to the right. If a row is shorter than the header, its last cell
    takes the remaining columns. A long table gets a scroll bar.
    """
    rows = list(rows)
    width = max([len(header), *map(len, rows)])
    numbers = [any(len(row) > n and isinstance(row[n], int | float) for row in rows) for n in range(width)]
    lines = [f'<div style="{_FONT}"><strong>{html.escape(title)}</strong>']
    lines += [f'<div style="opacity:.85">{html.escape(note)}</div>' for note in notes]
    if rows:
        lines.append('<div style="max-height:26em;overflow:auto">')
        lines.append(f'<table style="border-collapse:collapse;margin:4px 0 0;{_FONT}">')
        if header:
            cells = (_cell(name, "th", right) for name, right in zip(header, numbers, strict=True))
            lines.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
        lines.append("<tbody>")
        for row in rows:
            spans = [1] * (len(row) - 1) + [width - len(row) + 1]
            cells = (
                _cell(value, "td", isinstance(value, int | float), span) for value, span in zip(row, spans, strict=True)
            )
            lines.append(f'<tr style="background:none">{"".join(cells)}</tr>')
        lines.append("</tbody></table></div>")
    return "\n".join([*lines, "</div>"])


def _cell(value: object, tag: str, right: bool, span: int = 1) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    style = f"{_CELL};text-align:{'right' if right else 'left'};white-space:{'normal' if len(text) > 30 else 'nowrap'}"
    if tag == "th":
        style += f";font-weight:600;{_LINE}"
    wide = f' colspan="{span}"' if span > 1 else ""
    return f'<{tag}{wide} style="{style}">{html.escape(text)}</{tag}>'


def _given(result: object) -> list[tuple[str, object]]:
    """The fields of a dataclass that are not None, with their names."""
    named = ((field.name, getattr(result, field.name)) for field in dataclasses.fields(result))  # type: ignore[arg-type]
    return [(name, value) for name, value in named if value is not None]


def _of_tensor(tensor: Tensor) -> tuple[object, ...]:
    """The cells of a tensor: dtype, shape, and its lowest, mean and highest value (NaN does not count)."""
    kind = str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))
    if not concrete(tensor) or tensor.dtype == torch.bool:
        return kind
    values = tensor.detach().double()
    values = values[~values.isnan()]
    if not values.numel():
        return kind
    return *kind, float(values.min()), float(values.mean()), float(values.max())
