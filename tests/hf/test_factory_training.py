"""Training, compiling and inspecting models whose problems see the model."""

import pytest
import torch
import torch.distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache, StaticCache

import regard
from regard import AuxRequest, Decay, Transport, Tsallis
from support.factories import FACTORIES, ByLength, Fox, ScalableSoftmax
from support.models import build, padded

IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))


def model_with(factory, kind="llama"):
    torch.manual_seed(7)
    model = build(kind)
    model.set_attn_implementation(regard.hf.register("regard-factory", factory))
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_training_lowers_the_loss_and_changes_the_parameters(factory, name):
    model = model_with(FACTORIES[factory](), name).train()
    own = regard.hf.problem_parameters(model)
    before = [parameter.detach().clone() for parameter in own]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert all((now != then).any() for now, then in zip(own, before, strict=True))


@pytest.mark.parametrize("factory", ["fox", "scalable", "table", "factors"])
def test_the_factorys_parameters_alone_lower_the_loss(factory):
    model = model_with(FACTORIES[factory]()).train()
    optimizer = torch.optim.Adam(regard.hf.problem_parameters(model), lr=3e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02


def test_gradients_by_differences():
    fox = Fox()
    model = model_with(fox, "gpt2").double()  # the norms of Llama compute in float32

    def loss():
        return F.cross_entropy(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    loss().backward()
    bias = fox.get_parameter("gates.0.bias")
    assert bias.grad is not None
    found, step = bias.grad[1].item(), 1e-5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            bias[1] += sign * step
            losses.append(loss().item())
            bias[1] -= sign * step
    assert abs(found - (losses[0] - losses[1]) / (2 * step)) < 1e-7 and abs(found) > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    gradients = []
    for checkpointing in (False, True):
        fox = Fox()
        torch.manual_seed(0)
        for parameter in fox.parameters():
            torch.nn.init.normal_(parameter)
        model = model_with(fox).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_positions_under_gradient_checkpointing(name):
    """Two passes with other padding, and the backward passes after both."""
    passes = [
        {"input_ids": IDS, "attention_mask": padded("left")},
        {"input_ids": IDS, "attention_mask": padded("right")},
    ]
    passes += [{"input_ids": IDS, "position_ids": torch.arange(20).remainder(7).expand(2, -1), "use_cache": False}]
    gradients = []
    for checkpointing in (False, True):
        model = model_with(ByLength(), name).train()
        with torch.no_grad():
            model.base_model.regard_problem.slopes.fill_(0.7)
        torch.manual_seed(0)  # for dropout
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = [model(**given).logits for given in passes]
        sum(F.cross_entropy(one.flatten(0, 1), IDS.flatten()) for one in logits).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_positions_that_checkpointing_does_not_know_raise():
    model = model_with(ByLength()).eval()
    layer = model.model.layers[0]
    states, rope = torch.randn(1, 5, 32), model.model.rotary_emb(torch.randn(1, 5, 32), torch.arange(5)[None])
    with pytest.raises(RuntimeError, match=r"query_positions: .* or one of a layer alone"):
        layer(states, position_embeddings=rope)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train().model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: vars(kwargs["position_ids"]).clear(), with_kwargs=True
    )
    loss = model(IDS, labels=IDS).loss
    with pytest.raises(RuntimeError, match=r"query_positions: .* activation checkpointing repeats"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = model_with(Fox())
    with torch.no_grad():
        expected = model(IDS).logits
    with torch.autocast("cpu", dtype):
        found = model(IDS).logits
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert all(p.grad.isfinite().all() for p in regard.hf.problem_parameters(model))


def test_half_a_model():
    """The factory has the model's dtype, whether it is converted before or after."""
    for late in (False, True):
        model = build("llama") if late else build("llama").bfloat16()
        model.set_attn_implementation(regard.hf.register("regard-factory", Fox()))
        model.bfloat16()
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        with torch.no_grad():
            assert model(IDS).logits.isfinite().all()


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda model, fullgraph: torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "factory"), [("gpt2", "fox"), ("llama", "class"), ("llama", "factors")])
def test_a_compiled_model_in_training(name, factory, compiled):
    model = model_with(FACTORIES[factory](), name)
    found = []
    for run in (model, compiled(model, fullgraph=True)):
        model.zero_grad()
        logits = run(IDS, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
        found.append((logits.detach(), [p.grad.clone() for p in regard.hf.problem_parameters(model)]))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("factory", "kind"), [("fox", "dynamic"), ("scalable", "static")])
def test_compiled_decoding(factory, kind, compiled):
    model = model_with(FACTORIES[factory]())
    run = compiled(model, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=24) if kind == "static" else DynamicCache()
    with torch.no_grad():
        expected = model(IDS).logits
        model(IDS[:, :14], past_key_values=cache)
        for t in range(14, 20):
            step = run(IDS[:, t : t + 1], past_key_values=cache).logits
            assert torch.allclose(step[:, 0], expected[:, t], atol=1e-5)


def test_a_compiled_prefill_breaks_the_graph(compiled):
    model = model_with(Fox())
    with torch.no_grad():
        found = compiled(model, fullgraph=False)(IDS, past_key_values=DynamicCache()).logits
        assert torch.allclose(found, model(IDS).logits, atol=1e-5)


def test_what_cannot_be_compiled_raises(compiled):
    model = model_with(Fox())
    cache = StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"compiled step with a dense mask.* use a dynamic cache, or generate\(disable"
        ):
            compiled(model, fullgraph=False)(IDS[:, :1], past_key_values=cache)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"query_positions: expected a call of the model outside of"),
    ):
        compiled(model_with(ByLength()), fullgraph=False)(IDS, use_cache=False)


# --- several processes ------------------------------------------------------------------------------------------------


def test_distributed_data_parallel(tmp_path):
    """The parameters are the model's before it is wrapped, so that their gradients are reduced."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = model_with(Fox())
        wrapped = DistributedDataParallel(model)
        wrapped(IDS, labels=IDS).loss.backward()
        assert all((p.grad != 0).any() for p in regard.hf.problem_parameters(model))
    finally:
        torch.distributed.destroy_process_group()


# --- inspection -------------------------------------------------------------------------------------------------------


def test_inspection_records_the_problem_that_was_built():
    model = model_with(Fox())
    seen = regard.inspect(model, {"input_ids": IDS, "attention_mask": padded("left")}, patterns=True)
    assert seen.rows == 34 and seen.about["problems"] == {"regard-factory": "Factory(Fox(...))"}
    assert seen.about["declared"] == {"regard-factory": None} and "entropy" in seen.statistics
    calls = []

    class Listener:
        def model_called(self):
            pass

        def model_returned(self):
            pass

        def attend(self, call):
            calls.append(call)
            return regard.hf.attend(call.module, call.arguments)[0]

    with torch.no_grad():
        expected = model(IDS).logits
        with regard.hf.Interception(model, Listener()).attached():
            assert torch.equal(model(IDS).logits, expected)
    for call in calls:
        assert any(isinstance(factor, Decay) for factor in call.problem.prior.factors())
        states = call.arguments["problem"].prior.factors()[0].log_forget
        assert states.shape == (2, 4, 20)
    # the entropies of the recorded plans are those of the problem, computed by hand
    aux = regard.attention(**calls[0].arguments, return_aux=AuxRequest(entropy=True))[1]
    watched = regard.inspect(model, IDS)
    assert torch.allclose(watched.mean("entropy")[0].float(), aux.entropy.mean((0, 2)), atol=1e-5)


def test_a_model_is_watched_while_it_generates():
    model = model_with(Fox())
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    with regard.watch(model) as seen, regard.watch(model) as other:
        assert torch.equal(model.generate(IDS, **options), expected)
    assert seen.rows == other.rows == 48
    assert torch.equal(model.generate(IDS, **options), expected)


def test_statistics_of_a_problem_without_lse():
    model = model_with(lambda context: Transport(Tsallis(1.5)))
    assert regard.inspect(model, IDS).rows == 40


def test_a_monitored_training_step(tmp_path):
    model = model_with(Fox()).train()
    expected = model(IDS, labels=IDS).loss
    monitor = regard.Monitor(model, every=1, path=tmp_path)
    with monitor(0):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
    monitor.close()
    assert torch.allclose(loss, expected, atol=1e-6)
    assert "attn/entropy_norm/L01_p50" in (tmp_path / "attention.jsonl").read_text()
    assert all((p.grad != 0).any() for p in regard.hf.problem_parameters(model))


def test_entropies_of_built_problems():
    model = model_with(ScalableSoftmax())
    with regard.hf.entropies(model) as rows:
        model(IDS)
        rows.floor(3.0).backward()
    assert all((p.grad != 0).any() for p in regard.hf.problem_parameters(model))
    other = model_with(lambda context: Transport(Tsallis(1.5)))
    with regard.hf.entropies(other), pytest.raises(ValueError, match=r"expected one that solves KL\(\)"):
        other(IDS)
