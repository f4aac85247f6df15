"""Modules whose problem is a Transport with tensors of its own, or is built from the hidden states."""

import copy
import pickle

import pytest
import torch
from torch import nn

import regard
from regard import (
    ALiBi,
    ByKeys,
    Causal,
    Decay,
    Density,
    FDivergence,
    LowRank,
    Prefix,
    Relative,
    Rows,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from regard.features import LinearAttention
from regard.nn import Context, MultiheadAttention
from regard.nn.declared import built
from support.gpt import SMALL, leak, small, tokens
from support.multihead import B, E, H, Learned, T, held, output, x_held


def test_a_parameter_in_a_transport_is_a_parameter_of_the_module():
    module, sink = held()
    assert dict(module.named_parameters())["problem.marginal.sink"] is sink
    assert {"problem.marginal.sink", "problem.temperature"} == {n for n in module.state_dict() if "problem" in n}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = output(module, x_held)
    before.square().sum().backward()
    optimizer.step()
    assert sink.abs().min() > 0 and not torch.allclose(output(module, x_held), before)


def test_constants_of_a_transport_do_not_enter_the_state_dict():
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    ours = MultiheadAttention(E, H, batch_first=True, problem=Transport(prior=ALiBi(torch.ones(H))))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match=r"Missing.*problem\.marginal\.sink"):  # torch's module has no sinks
        held()[0].load_state_dict(theirs.state_dict())
    assert held()[0].load_state_dict(theirs.state_dict(), strict=False).missing_keys


def with_sink(module, value):
    """The module's output with the sink `value`, computed with a new Transport."""
    problem = module.problem()
    other = Transport(prior=problem.prior, marginal=Rows(sink=value), temperature=problem.temperature)
    plain = MultiheadAttention(E, H, batch_first=True, problem=lambda: other)
    plain.load_state_dict({n: p for n, p in module.state_dict().items() if "problem" not in n})
    return output(plain, x_held)


def test_the_forward_pass_uses_replaced_parameters():
    module, sink = held()
    value = torch.tensor([1.0, -1.0, 2.0])
    expected = with_sink(module, value)
    assert not torch.allclose(output(module, x_held), expected)
    called = torch.func.functional_call(
        module, {"problem.marginal.sink": value}, (x_held, x_held, x_held), {"need_weights": False}
    )
    torch.testing.assert_close(called[0], expected)
    copied = copy.deepcopy(module)
    copied.load_state_dict(module.state_dict() | {"problem.marginal.sink": value})
    torch.testing.assert_close(output(copied, x_held), expected)
    assert not sink.any()  # the copy has its own parameter


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_with_a_transport_can_be_copied(copied):
    module, sink = held()
    other = copied(module)
    torch.testing.assert_close(output(other, x_held), output(module, x_held))
    output(other, x_held).square().sum().backward()
    assert other.problem.marginal.sink.grad.abs().sum() > 0 and sink.grad is None


def test_conversions_reach_the_tensors_of_a_transport():
    module, _ = held()
    problem = built(module.to(torch.bfloat16).problem)
    assert problem.marginal.sink.dtype == problem.temperature.dtype == torch.bfloat16
    slopes = problem.prior.factors()[1].slopes
    assert torch.equal(slopes, torch.linspace(0.1, 0.5, H))  # a constant is not rounded
    assert torch.equal(built(module.to_empty(device="cpu").problem).prior.factors()[1].slopes, slopes)  # nor erased
    problem = built(module.to("meta").problem)
    assert problem.marginal.sink.is_meta and problem.prior.factors()[1].slopes.is_meta


def test_a_module_with_a_transport_compiles():
    module, sink = held()
    # Parts without tensors are not rebuilt: under torch.compile this one could not be.
    chi2 = FDivergence(lambda x: (x - 1).square() / 2, lambda t: t + 1, torch.ones_like, lower=-1.0)
    other = MultiheadAttention(E, H, batch_first=True, problem=Transport(chi2, marginal=Rows(sink=sink)))
    for each in (module, other):
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(output(compiled, x_held), output(each, x_held))
            sink.data += 1.0
    torch._dynamo.reset()


def test_a_shared_parameter_stays_shared():
    shared = nn.Parameter(torch.ones(H, 1, 1))
    module = MultiheadAttention(E, H, problem=Transport(marginal=Rows(sink=shared), temperature=shared))
    for each in (module, copy.deepcopy(module).double()):
        assert each.get_parameter("problem.marginal.sink") is each.get_parameter("problem.temperature")
        assert len([n for n, _ in each.named_parameters() if "problem" in n]) == 1
    assert {"problem.marginal.sink", "problem.temperature"} < set(module.state_dict())


def test_tensors_that_cannot_be_registered_raise():
    parameter = nn.Parameter(torch.zeros(H, 1, 1))
    with pytest.raises(ValueError, match=r"problem: expected an nn.Parameter.*at temperature, got .* computed"):
        MultiheadAttention(E, H, problem=Transport(temperature=parameter.exp()))
    prior = Causal() * ALiBi(torch.ones(H, requires_grad=True))
    with pytest.raises(ValueError, match=r"at prior.parts.1.slopes, got .* that requires grad"):
        MultiheadAttention(E, H, problem=Transport(prior=prior))


def test_a_problem_can_be_replaced():
    module, sink = held()
    plain = Transport(Tsallis(1.5))
    for problem in (plain, lambda: plain, None, LinearAttention(), Learned(H), plain):
        module.problem = problem
        assert module.problem is problem and sink not in set(module.parameters())
    module.problem = Transport(marginal=Rows(sink=sink))
    assert dict(module.named_parameters())["problem.marginal.sink"] is sink
    with pytest.raises(TypeError, match="problem: expected a Transport"):
        module.problem = "softmax"


@pytest.mark.parametrize("each", [False, True])
def test_the_transformer_learns_parameters_of_a_transport(each, tmp_path):
    def problem(_):
        return Transport(marginal=Rows(sink=nn.Parameter(torch.zeros(2))))

    model, other = (small(problem=problem if each else problem(0)) for _ in range(2))
    sinks = [p for n, p in model.named_parameters() if n.endswith("problem.marginal.sink")]
    assert len(sinks) == (2 if each else 1)  # layers share the parameters of one Transport
    model.loss(tokens).backward()
    assert all(sink.grad.abs().sum() > 0 for sink in sinks)
    for sink in sinks:
        sink.data += 1.0
    model.save(tmp_path / "model.safetensors")
    other.load(tmp_path / "model.safetensors")
    assert all(p.marginal.sink.min() == 1 for p in other.problems())
    assert torch.equal(other(tokens[:, :-1]), model(tokens[:, :-1]))


def structured(heads, length, parameters=nn.Parameter):
    """A Transport with structured priors and a temperature by keys, all of whose tensors are `parameters`."""
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator) / 2

    priors = (
        Causal()
        * Relative(parameters(drawn(heads, 5)))
        * LowRank(parameters(drawn(heads, length, 2)), parameters(drawn(heads, length, 2)))
        * Decay(parameters(-drawn(heads, length).abs()))
        * Density(parameters(drawn(length, length).abs() + 0.1))
    )
    rule = ByKeys(*(parameters(drawn(heads).abs() + 1) for _ in range(3)))
    return Transport(prior=priors, temperature=rule)


LEARNED = {
    "prior.parts.1.table",
    "prior.parts.2.query_factor",
    "prior.parts.2.key_factor",
    "prior.parts.3.log_forget",
    "prior.parts.4.prior",
    "temperature.slope",
    "temperature.offset",
    "temperature.power",
}


def test_structured_priors_are_registered_trained_and_saved():
    torch.manual_seed(0)
    module = MultiheadAttention(E, H, batch_first=True, problem=structured(H, T))
    own = {n.removeprefix("problem."): p for n, p in module.named_parameters() if n.startswith("problem.")}
    assert own.keys() == LEARNED == {n.removeprefix("problem.") for n in module.state_dict() if "problem" in n}
    before, at_first = output(module, x_held), {n: p.detach().clone() for n, p in own.items()}
    before.square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    assert all((p != at_first[n]).any() for n, p in own.items())
    assert not torch.allclose(output(module, x_held), before)
    other = MultiheadAttention(E, H, batch_first=True, problem=structured(H, T))
    assert not torch.allclose(output(other, x_held), output(module, x_held))
    other.load_state_dict(module.state_dict())
    assert torch.equal(output(other, x_held), output(module, x_held))


def test_the_transformer_learns_structured_priors(tmp_path):
    model, other = (small(problem=lambda layer: structured(2, 16)) for _ in range(2))
    names = {n for n, _ in model.named_parameters() if ".problem." in n}
    assert names == {f"blocks.{layer}.attention.problem.{name}" for layer in range(2) for name in LEARNED}
    model.loss(tokens).backward()
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in names)
    for name in names:
        model.get_parameter(name).data *= 1.1
    model.save(tmp_path / "model.safetensors")
    other.load(tmp_path / "model.safetensors")
    assert torch.equal(other(tokens[:, :-1]), model(tokens[:, :-1]))


def test_constants_of_unions_are_buffers():
    lengths, index = torch.tensor([2, 3]), torch.tensor([[0], [1], [2], [3], [4]])
    prior = Causal() | Prefix(lengths) | Window(1, 1) * Selected(index)
    module = MultiheadAttention(E, H, batch_first=True, problem=Transport(prior=prior))
    held_by = {n.removeprefix("problem."): b for n, b in module.named_buffers()}
    assert held_by == {"prior.parts.1.n": lengths, "prior.parts.2.parts.1.index": index}
    assert not any("problem" in n for n in module.state_dict())
    problem = built(module.to(torch.bfloat16).problem)
    assert problem.prior.parts[1].n.dtype == torch.long and problem.prior == prior
    q = torch.randn(B, H, T, 4)
    torch.testing.assert_close(
        regard.attention(q, q, q, problem=problem), regard.attention(q, q, q, problem=Transport(prior=prior))
    )


# --- problems that depend on the hidden states ------------------------------------------------------------------------


class Gates(nn.Module):
    """Forget gates from the hidden states."""

    def __init__(self, heads, width):
        super().__init__()
        self.gate = nn.Linear(width, heads)

    def forward(self, context):
        assert isinstance(context, Context) and context.heads == self.gate.out_features
        return Transport(prior=Decay(nn.functional.logsigmoid(self.gate(context.hidden_states)).mT))


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_problem_from_the_hidden_states(batch_first):
    torch.manual_seed(0)
    gates = Gates(H, E)
    module = MultiheadAttention(E, H, batch_first=batch_first, problem=gates)
    x = torch.randn(B, T, E)
    problem = gates(Context(module, H, x))
    fixed = MultiheadAttention(E, H, batch_first=True, problem=lambda: problem)
    fixed.load_state_dict({n: p for n, p in module.state_dict().items() if "problem" not in n})
    given = x if batch_first else x.transpose(0, 1)
    out = output(module, given)
    expected = output(fixed, x)
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected)
    out.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in gates.parameters())


def test_the_transformer_builds_problems_from_its_hidden_states():
    model = small(problem=lambda layer: Gates(2, SMALL["width"]), positions=None)
    assert leak(model) == 0
    model.loss(tokens).backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if ".problem.gate." in n)
    with pytest.raises(ValueError, match="problem: expected one that is the same for all inputs, got Gates"):
        model.problems()
    h = model._stream(tokens[:, :-1])
    for block, (q, k, v), problem in zip(
        model.blocks, model.heads(tokens[:, :-1]), model.problems(tokens[:, :-1]), strict=True
    ):
        out = regard.attention(q, k, v, is_causal=True, problem=problem).transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attention(block.get_submodule("norms.0")(h)), block.attention.out(out))
        h = block(h)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens[:, :-1]), model(tokens[:, :-1]))
    torch._dynamo.reset()


def test_a_constant_on_the_meta_device_cannot_be_moved():
    with torch.device("meta"):
        module = MultiheadAttention(E, H, problem=Transport(temperature=torch.ones(H, 1, 1)))
    with pytest.raises(
        RuntimeError, match=r"problem: expected a Transport that is built outside.*got temperature on the meta"
    ):
        module.to_empty(device="cpu")
