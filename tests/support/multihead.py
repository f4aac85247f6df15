"""A MultiheadAttention of PyTorch and ours with the same weights, their inputs, and modules that hold a problem."""

import torch
from torch import nn

from regard import KL, ALiBi, Causal, Rows, Transport
from regard.features import LinearAttention, Performer, ReLUFeatures
from regard.nn import MultiheadAttention, Temperature

B, T, S, E, H = 2, 5, 7, 12, 3


def both(**kwargs):
    """PyTorch's module and ours with the same weights, in float64, with biases that are not 0."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **kwargs)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def gradients(module, inputs, call):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out, weights = module(*inputs, **call)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    if weights is not None:
        loss = loss + (weights * torch.linspace(-1, 2, weights.numel(), dtype=out.dtype).view_as(weights)).sum()
    loss.backward()
    return out, weights, [x.grad for x in inputs], {n: p.grad for n, p in module.named_parameters()}


def inputs(kdim=E, vdim=E, batch_first=True, batched=True):
    found = [torch.randn(B, n, e, dtype=torch.float64) for n, e in ((T, E), (S, kdim), (S, vdim))]
    if not batched:
        return [x[0] for x in found]
    return found if batch_first else [x.transpose(0, 1) for x in found]


forbidden = torch.rand(T, S) < 0.3
forbidden[:, 2] = False
padding = torch.zeros(B, S, dtype=torch.bool)
padding[1, 4:] = True


class Learned(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.temperature = Temperature(heads)
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self):
        return Transport(KL(), marginal=Rows(sink=self.sink), temperature=self.temperature())


# --- tensors of a Transport given directly ----------------------------------------------------------------------------


def held(heads=H):
    """A module whose Transport has two parameters and a constant; and the parameter that is its sink."""
    torch.manual_seed(0)
    sink = nn.Parameter(torch.zeros(heads))
    prior = Causal() * ALiBi(torch.linspace(0.1, 0.5, heads))
    problem = Transport(prior=prior, marginal=Rows(sink=sink), temperature=nn.Parameter(torch.ones(heads, 1, 1)))
    return MultiheadAttention(E, heads, batch_first=True, problem=problem), sink


def output(module, x):
    return module(x, x, x, need_weights=False)[0]


x_held = torch.randn(B, T, E, generator=torch.Generator().manual_seed(5))


FEATURES = {
    "linear": LinearAttention,
    "relu": ReLUFeatures,
    "performer": lambda: Performer(E // H, 16, generator=torch.Generator().manual_seed(0)),
}
