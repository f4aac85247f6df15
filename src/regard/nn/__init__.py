"""Modules and functions for training: what keeps attention healthy."""

from .stability import entropy_floor as entropy_floor
from .stability import qk_clip_ as qk_clip_
