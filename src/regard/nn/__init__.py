"""Modules: `MultiheadAttention` with any problem, learned temperatures, a small readable transformer; and two functions
that stabilize attention in training."""

from .attention import MultiheadAttention as MultiheadAttention
from .attention import Temperature as Temperature
from .clip import qk_clip_ as qk_clip_
from .context import Context as Context
from .stability import entropy_floor as entropy_floor
from .transformer import Transformer as Transformer
