"""What a kernel is given: tensors as pointers with strides, and the problem as one record.

A field that is None is a part that the problem does not have. Triton compiles a kernel without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operand(NamedTuple):
    """A tensor that broadcasts to [B, H, Tq, Tk]: its address, and strides that are 0 where it broadcasts."""

    data: Any
    b: Any
    h: Any
    i: Any
    j: Any


class Problem(NamedTuple):
    """A `Form` as kernels read it. Queries, keys and values are operands [B, H|Hkv, T, D]: i is the row, j the
    column."""

    query: Any
    key: Any
    value: Any
    readable: Any  # [B|1, Hkv|1, 1, Tk] of 0 and 1: keys that some query may read; None: all of them

    score_bias: Any
    mask: Any
    log_priors: Any  # a tuple of operands
    slopes: Any
    relative: Any  # j is the entry of the table
    reach: Any
    query_factor: Any  # j is the column of the factor
    key_factor: Any
    rank: Any
    decay_query: Any
    decay_key: Any
    density: Any
    selected: Any  # j is the place in the list
    selections: Any
    selected_block: Any
    tile_map: Any  # i and j are tiles
    tiles: Any
    rows_order: Any  # per block of queries, the blocks of keys to visit: the mixed ones, then the full ones
    rows_counts: Any  # their numbers: mixed ones, and both (launch.schedule)
    columns_order: Any  # the same per block of keys
    columns_counts: Any
    query_ids: Any
    key_ids: Any
    dropout_key: Any

    temperature: Any  # an operand, or None where `temperature_value` holds
    level: Any  # the marginal's parameter: sink, rho or offset
    alpha: Any
    temperature_value: Any
    level_value: Any
    alpha_value: Any

    scale: Any
    softcap: Any
    mass: Any
    threshold: Any  # dropout keeps a weight where its hash is at least this
    kept_scale: Any
    H: Any
    group: Any  # query heads that share a key head
    Tq: Any
    Tk: Any
    left: Any
    right: Any
    offset: Any
