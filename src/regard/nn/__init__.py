"""Modules: `torch.nn.MultiheadAttention` with any problem, learned temperatures, and a small readable transformer."""

from .attention import MultiheadAttention as MultiheadAttention
from .attention import Temperature as Temperature
from .transformer import Transformer as Transformer
