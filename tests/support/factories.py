"""Problems that see the model: what the tests register."""

import torch
from torch import nn
from torch.nn import functional as F

from regard import ByKeys, Decay, LowRank, Relative, Transport, Tsallis

WIDTH, HEADS, LAYERS = 32, 4, 2


class Fox(nn.Module):
    """Forget gates from the hidden states, one projection for each layer."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, HEADS) for _ in range(layers))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, context):
        gates = self.scale * F.logsigmoid(self.gates[context.layer](context.hidden_states)).mT  # [B, H, Tq]
        return Transport(prior=Decay(context.remember("gates", gates)))


class GatesOfOne(nn.Module):
    """The same as a class: each attention has an instance."""

    def __init__(self, attention):
        super().__init__()
        config = attention.config
        self.gate = nn.Linear(config.hidden_size, config.num_attention_heads)
        nn.init.constant_(self.gate.bias, 3.0)

    def forward(self, context):
        return Transport(prior=Decay(context.remember("gates", F.logsigmoid(self.gate(context.hidden_states)).mT)))


class ScalableSoftmax(nn.Module):
    """The inverse temperature grows with log n, by a slope for each head of each layer."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(LAYERS, HEADS, 1, 1) + 0.5)

    def forward(self, context):
        return Transport(temperature=ByKeys(self.slopes[context.layer], 0.5))


class ByLength(nn.Module):
    """The same from the positions: n is the length of the query's sequence so far."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(LAYERS, HEADS, 1, 1) + 0.5)

    def forward(self, context):
        n = (context.query_positions + 1).float()[:, None, :, None]
        return Transport(temperature=1 / (0.5 + self.slopes[context.layer] * n.log()))


class Table(nn.Module):
    """A learned number for each distance."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(LAYERS, HEADS, 17))

    def forward(self, context):
        return Transport(Tsallis(1.5), prior=Relative(self.table[context.layer]))


class Factors(nn.Module):
    """A learned prior of rank 3 from the hidden states."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Linear(WIDTH, 3 * HEADS) for _ in range(2))

    def forward(self, context):
        query, key = (m(context.hidden_states).unflatten(2, (HEADS, 3)) for m in (self.query, self.key))
        remembered = context.remember("factors", key.permute(0, 2, 3, 1))  # [B, H, 3, Tk]
        return Transport(prior=LowRank(query.transpose(1, 2), remembered.mT))


FACTORIES = {
    "fox": Fox,
    "class": lambda: GatesOfOne,
    "scalable": ScalableSoftmax,
    "length": ByLength,
    "table": Table,
    "factors": Factors,
}
