"""Attention in linear time: a feature map replaces exp(score).

A feature map phi >= 0 gives query i and key j the weight <phi(q_i), phi(k_j)>. The sum over the keys can then be
computed once for all queries, because the matrix product is associative:

    out_i = sum_j <phi(q_i), phi(k_j)> v_j / sum_j <phi(q_i), phi(k_j)>  =  phi(q_i) S / phi(q_i) z,
    S = sum_j phi(k_j) v_j^T,  z = sum_j phi(k_j):  M numbers per column of v, for any number of keys.

`LinearAttention` (elu + 1), `ReLUFeatures` and `Performer` differ only in phi. The rows of their plans sum to 1, but
the plans are not optima of a transport problem, so there is no `Transport` for them. The kernel of `Performer` has the
mean exp(scale <q, k>) over random draws: numerator and denominator are unbiased, and their quotient tends to softmax as
the number of features grows.

    base          `Features`: the call, its checks, its statistics, and `step` for decoding
    maps          the three feature maps
    projections   random directions, which `Performer` and `ReLUFeatures` use
    sums          the computation in PyTorch operations, chunk by chunk
    fused         the same computation by the native engine on the CPU, in one kernel
"""

from .base import STATISTICS as STATISTICS
from .base import Features as Features
from .maps import LinearAttention as LinearAttention
from .maps import Performer as Performer
from .maps import ReLUFeatures as ReLUFeatures
from .projections import directions as directions
from .sums import State as State
