"""Which operators PyTorch calls."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from regard.acceleration import FORWARD


class Names(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


def groups_heads() -> bool:
    """Whether PyTorch uses its CPU kernel for grouped heads. That of 2.8 reads beyond the keys if it gets them."""
    with Names() as names:
        q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    return f"aten::{FORWARD}" in names.seen
