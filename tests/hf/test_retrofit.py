"""Parameters added to trained models: they change nothing at first, have a gradient, and are saved and loaded."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file, save_file

import regard
from regard import ALiBi, Causal, Rows, Transport, Tsallis
from regard.hf import Retrofit
from support.checkpoints import stories260k
from support.models import DECODERS, build, inputs_of, logits, padded

ALL = ("temperature", "sink", "bias")


def learned_by(name):
    return ("temperature", "bias") if name == "gpt_oss" else ALL


def retrofitted(name, learn=None, **options):
    return regard.hf.retrofit(build(name), learned_by(name) if learn is None else learn, **options)


def randomize(model, seed=0):
    """Random values for all parameters, different in each head; head 1 has no null key."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Retrofit):
                for name, parameter in module.named_parameters():
                    fresh = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    fresh = fresh.abs() if name == "null_weight" else 0.3 * fresh
                    if name == "null_weight":
                        fresh[1] = 0.0
                    parameter.copy_(fresh)
    return model


def in_double(model):
    """Float64 throughout: transformers' RMS norms round to float32, which hides finite differences."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "RMSNorm" in type(child).__name__:
                norm = torch.nn.RMSNorm(child.weight.shape[0], eps=1e-6)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model.double()


def gradients(model, given, loss=None):
    model.zero_grad()
    out = model(**given).logits
    (
        F.cross_entropy(out[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten()) if loss is None else loss(out)
    ).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if ".retrofit." in name}


# --- at the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_new_parameters_change_nothing(name):
    model, given = build(name), inputs_of(name, "left")
    before = logits(model, "regard", given)
    regard.hf.retrofit(model, learned_by(name))
    watched = model(**given).logits  # with gradients, and without
    with torch.no_grad():
        plain = model(**given).logits
    rounding = 16 * torch.finfo(torch.float32).eps * float(before.abs().max())
    assert float((watched - before).detach().abs().max()) <= rounding
    assert float((plain - before).abs().max()) <= rounding


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_null_key_of_weight_0_changes_no_bit(name):
    model, given = build(name), inputs_of(name, "left")
    before = logits(model, "regard", given)
    regard.hf.retrofit(model, "sink")
    assert torch.equal(model(**given).logits, before)
    with torch.no_grad():
        assert torch.equal(model(**given).logits, before)
        for module in model.modules():  # not even with a high score
            if isinstance(module, Retrofit):
                module.null_score.fill_(200.0)
    assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_the_gradient_at_the_start_equals_finite_differences(name):
    """In float64, for every parameter that changes the loss; none of these gradients is 0."""
    model, given = in_double(retrofitted(name)), inputs_of(name, "right")

    def loss():
        with torch.no_grad():
            out = model(**given).logits
        return float(F.cross_entropy(out[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten()))

    found, start, step = gradients(model, given), loss(), 1e-6
    for full, gradient in found.items():
        parameter = dict(model.named_parameters())[full]
        if full.endswith("null_score"):  # the score of a key of weight 0 has no effect
            assert not gradient.any()
            continue
        for head in range(4):
            with torch.no_grad():
                parameter[head] += step
            rise = (loss() - start) / step  # one-sided: a weight starts at its lowest value
            with torch.no_grad():
                parameter[head] -= step
            assert gradient[head] != 0 and abs(rise - float(gradient[head])) < 1e-4 * max(1, abs(rise)), full


def test_a_negative_weight_counts_as_zero_and_can_increase_again():
    model, given = retrofitted("llama", "sink").double(), inputs_of("llama")
    at_zero = logits(model, "regard", given)
    up = gradients(model, given)
    down = gradients(
        model, given, lambda out: -F.cross_entropy(out[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten())
    )
    with torch.no_grad():
        for parameter in regard.hf.retrofitted_parameters(model)[::2]:
            parameter.fill_(-0.5)
    assert torch.equal(logits(model, "regard", given), at_zero)
    below = gradients(model, given)
    for name, gradient in up.items():
        if name.endswith("null_weight"):
            assert torch.allclose(gradient, -down[name]) and gradient.all()
            assert torch.allclose(below[name], gradient.clamp(max=0))  # only a gradient that increases the weight


@pytest.mark.parametrize("potential", [-60.0, 0.0, 60.0])
def test_the_gradient_does_not_vanish_at_any_potential(potential):
    """A common offset of the scores changes no softmax if the null key's score has it too."""
    torch.manual_seed(0)
    module = Retrofit(2, ("sink",))
    with torch.no_grad():
        module.null_score.fill_(potential)
    lse = torch.randn(1, 2, 5) + potential
    kept = module.kept_mass(lse, 1.0)
    assert torch.equal(kept, torch.ones_like(kept))
    kept.sum().backward()
    assert torch.allclose(module.null_weight.grad, -(potential - lse).exp().sum((0, 2)), rtol=1e-5)


# --- the computation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_the_parameters_are_those_of_a_public_problem(grad):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.retrofit = Retrofit(4, ALL, dtype=torch.float64)
    randomize(module)
    r = module.retrofit
    q, k, v = (torch.randn(2, h, 9, 8, dtype=torch.float64) for h in (4, 2, 2))
    with torch.set_grad_enabled(grad):
        got, _ = regard.hf.attention_function(None, module, q, k, v, None)
    tau = r.log_temperature.detach().exp()[:, None, None]
    weight = r.null_weight.detach().clamp(min=1e-300)[:, None, None]
    problem = Transport(
        prior=Causal() * ALiBi(r.slopes.detach()),
        marginal=Rows(sink=r.null_score.detach()[:, None, None] + tau * weight.log()),
        temperature=tau,
    )
    expected = regard.attention(q, k, v, enable_gqa=True, problem=problem).transpose(1, 2)
    assert torch.allclose(got, expected, atol=1e-12)
    call = regard.hf.as_call(None, module, q, k, v, None)
    assert torch.allclose(regard.attention(**call).transpose(1, 2), expected, atol=1e-12)
    assert regard.select_backend(**call).backend in ("native", "torch")


def test_the_native_engine_computes_it_with_gradients():
    if (
        regard.select_backend(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)).backend
        != "native"
    ):
        pytest.skip("no native engine")
    module = torch.nn.Module()
    module.retrofit = randomize(Retrofit(4, ALL))
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    call = regard.hf.as_call(None, module, q, k, k, None)
    choice = regard.select_backend(**call, return_aux=regard.AuxRequest(lse=True, entropy=True))
    assert choice.backend == "native" and not choice.reasons
    out, aux = regard.attention(**call, backend="native", return_aux=regard.AuxRequest(entropy=True))
    (out.sum() + aux.entropy.sum()).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in module.retrofit.parameters())


def test_both_computations_have_the_same_gradients():
    """The output without the null key times the mass that it leaves, and the problem with the null key."""
    module = torch.nn.Module()
    module.retrofit = randomize(Retrofit(4, ALL, dtype=torch.float64))
    with torch.no_grad():
        module.retrofit.null_weight[1] = 0.4
    q, k, v = (torch.randn(2, h, 9, 8, dtype=torch.float64) for h in (4, 2, 2))
    upstream = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    found = []
    for way in (lambda call: regard.hf.attend(module, call)[0], lambda call: regard.attention(**call)):
        module.zero_grad()
        (way(regard.hf.as_call(None, module, q, k, v, None)) * upstream).sum().backward()
        found.append([p.grad.clone() for p in module.retrofit.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-10) and one.abs().min() > 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_changes_nothing(name, cache):
    """Chunks with a cache against the whole text: the distances between tokens are the same."""
    model, given = randomize(retrofitted(name)).double(), inputs_of(name)
    mask = padded("left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = logits(model, "regard", given | {"attention_mask": mask, "position_ids": positions})
    kind = (
        hf.StaticCache(config=model.config, max_cache_len=32)
        if cache == "static"
        else hf.DynamicCache(config=model.config)
    )
    parts = []
    with torch.no_grad():
        for start, stop in ((0, 9), (9, 17), (17, 18), (18, 20)):
            step = slice(start, stop)
            step = {"input_ids": given["input_ids"][:, step], "position_ids": positions[:, step]}
            parts.append(model(**step, attention_mask=mask[:, :stop], past_key_values=kind).logits)
    real = mask.bool()
    assert torch.allclose(torch.cat(parts, 1)[real], whole[real], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gpt_oss"])
def test_generate(name):
    model, given = randomize(retrofitted(name)).double(), inputs_of(name, "left")
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**given, **options)
    for other in ({"use_cache": False}, {"cache_implementation": "static"}):
        again = model.generate(**given, **options, **other)
        assert torch.equal(again.sequences, plain.sequences)
        assert torch.allclose(torch.stack(again.logits), torch.stack(plain.logits), atol=1e-4)


def test_packed_sequences():
    model, tokens = randomize(retrofitted("llama")).double(), inputs_of("llama")["input_ids"][:1]
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = logits(model, "regard", {"input_ids": tokens, "position_ids": positions, "use_cache": False})
    alone = [logits(model, "regard", {"input_ids": t}) for t in (tokens[:, :8], tokens[:, 8:])]
    assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-6)


def test_compiled():
    model = randomize(regard.hf.retrofit(build("mistral", num_hidden_layers=1))).double()
    given = inputs_of("mistral", "left")
    expected, real = gradients(model, given), given["attention_mask"].bool()
    whole = logits(model, "regard", given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    out = compiled(**given, use_cache=False).logits
    assert torch.allclose(out[real], whole[real], atol=1e-6)
    F.cross_entropy(out[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten()).backward()
    for name, gradient in expected.items():
        assert torch.allclose(dict(model.named_parameters())[name].grad, gradient, atol=1e-8), name
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, given = randomize(retrofitted("mistral")).double().train(), inputs_of("mistral", "right")
    expected = gradients(model, given | {"use_cache": False})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(model, given | {"use_cache": False}).items():
        assert torch.allclose(gradient, expected[name], atol=1e-10), name


def test_half_precision_and_autocast():
    model, given = randomize(retrofitted("llama")), inputs_of("llama")
    exact = logits(copy.deepcopy(model).double(), "regard", given)
    plain = float(
        (logits(build("llama").bfloat16(), "regard", given).double() - logits(build("llama").double(), "regard", given))
        .abs()
        .max()
    )
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(**given).logits
    half = copy.deepcopy(model).bfloat16()
    assert {p.dtype for p in regard.hf.retrofitted_parameters(half)} == {torch.bfloat16}
    for got in (cast, half(**given).logits):
        assert float((got - exact).detach().abs().max()) < 4 * plain
    gradients(half, given)


def test_a_registered_problem_is_kept():
    name = regard.hf.register("regard-warmer", Transport(temperature=1.5))
    model, given = build("llama").double(), inputs_of("llama")
    before = logits(model, name, given)
    regard.hf.retrofit(model)
    assert model.config._attn_implementation == name
    with torch.no_grad():
        assert torch.allclose(model(**given).logits, before, atol=1e-10)
        for parameter in (p for n, p in model.named_parameters() if n.endswith("log_temperature")):
            parameter.fill_(-math.log(1.5))
    assert torch.allclose(model(**given).logits, logits(build("llama").double(), "regard", given), atol=1e-10)


def test_entmax_has_temperatures_and_slopes_but_no_null_key():
    name = regard.hf.register("regard-entmax15", Transport(Tsallis(1.5)))
    model, given = build("llama").double(), inputs_of("llama")
    before = logits(model, name, given)
    regard.hf.retrofit(model, ("temperature", "bias"))
    assert torch.allclose(model(**given).logits, before, atol=1e-10)
    regard.hf.retrofit(regard.hf.unretrofit(model), "sink")
    with pytest.raises(ValueError, match=r'learn: expected a problem with KL\(\) and plain Rows\(\) for "sink"'):
        model(**given)


# --- training them ----------------------------------------------------------------------------------------------------


def test_freeze_leaves_only_the_new_parameters_trainable():
    model = retrofitted("llama", freeze=True)
    free = [name for name, p in model.named_parameters() if p.requires_grad]
    assert free and all(".retrofit." in name for name in free)
    assert len(free) == len(regard.hf.retrofitted_parameters(model)) == 2 * 4


@pytest.mark.parametrize("learn", ["temperature", "sink", "bias"])
def test_each_kind_alone_lowers_the_loss_of_a_trained_model(learn):
    model = stories260k()
    tokens = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    regard.hf.retrofit(model, learn, freeze=True, inputs=tokens if learn == "sink" else None)
    frozen = {name: p.clone() for name, p in model.named_parameters() if ".retrofit." not in name}
    optimizer = torch.optim.Adam(regard.hf.retrofitted_parameters(model), lr=0.02)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.01, losses
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_inputs_set_the_null_keys_score():
    tokens = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    model = stories260k()
    dual = regard.inspect(model, tokens, statistics=("dual",)).mean("dual")
    plain = logits(model, "regard", {"input_ids": tokens})
    regard.hf.retrofit(model, "sink", inputs=tokens)
    scores = torch.stack([m.retrofit.null_score for m in regard.hf.attentions(model).values()])
    assert torch.allclose(scores.double(), dual, atol=1e-5)
    assert torch.equal(model(tokens).logits, plain)
    with torch.no_grad():
        for module in regard.hf.attentions(model).values():
            module.retrofit.null_weight.fill_(1.0)
    mass = regard.inspect(model, tokens, statistics=("mass",)).mean("mass")
    assert ((mass > 0.3) & (mass < 0.7)).double().mean() > 0.9


# --- saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_saved_and_loaded(name, tmp_path):
    model, given = randomize(retrofitted(name)), inputs_of(name)

    def as_built(other, *arguments):  # transformers may multiply a loaded model's experts in another way
        other.config._experts_implementation = model.config._experts_implementation
        return logits(other, *arguments)

    expected = logits(model, "regard", given)
    model.save_pretrained(tmp_path)
    loaded = regard.hf.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.config._attn_implementation == "regard"
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())
    assert torch.equal(as_built(loaded, "regard", given), expected)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert torch.equal(as_built(regard.hf.from_pretrained(again), "regard", given), expected)
    half = regard.hf.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_state_dict_is_enough():
    model, given = randomize(retrofitted("llama")), inputs_of("llama")
    other = regard.hf.retrofit(build("llama"))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, "regard", given), logits(model, "regard", given))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*retrofit"):
        build("llama").load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*retrofit"):
        other.load_state_dict(build("llama").state_dict())


def test_keys_that_do_not_match_raise(tmp_path):
    model = randomize(retrofitted("llama"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    key = "model.layers.0.self_attn.retrofit.slopes"
    for bad, message in (
        ({n: t for n, t in good.items() if n != key}, rf"missing keys: 1, such as {key}"),
        (good | {key + "2": good[key].clone()}, rf"unexpected keys: 1, such as {key}2"),
    ):
        save_file(bad, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            regard.hf.from_pretrained(tmp_path)
    save_file(good | {key: torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"mismatch|ignore_mismatched"):
        regard.hf.from_pretrained(tmp_path)


def test_a_checkpoint_loaded_without_its_parameters_raises(tmp_path):
    given = inputs_of("llama")
    randomize(retrofitted("llama")).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["regard_retrofit"] == list(ALL)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for use in (
        lambda: logits(model, "regard", given),
        lambda: regard.inspect(model, given["input_ids"]),
        lambda: regard.hf.retrofit(model),
    ):
        with pytest.raises(ValueError, match=r"regard\.hf\.from_pretrained loads it"):
            use()
    regard.hf.unretrofit(model)
    assert torch.equal(logits(model, "regard", given), logits(build("llama"), "regard", given))


def test_load_finds_it(tmp_path):
    model = randomize(retrofitted("llama"))
    model.save_pretrained(tmp_path)
    loaded, tokenizer = regard.hf.load(str(tmp_path))
    assert tokenizer is None and not loaded.training
    assert torch.equal(logits(loaded, "regard", inputs_of("llama")), logits(model, "regard", inputs_of("llama")))
    build("llama").save_pretrained(tmp_path / "plain")
    assert regard.hf.load(str(tmp_path / "plain"))[0].config._attn_implementation == "eager"


def test_from_pretrained_needs_a_retrofitted_checkpoint(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="name: expected a checkpoint of a retrofitted model"):
        regard.hf.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation: expected to be left out"):
        regard.hf.from_pretrained(tmp_path, attn_implementation="sdpa")
    retrofitted("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changed, message in (
        ({"architectures": ["pipeline"]}, "name: expected a checkpoint of one of transformers' own models"),
        ({"regard_retrofit": ["heat"]}, "learn: expected some of"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ValueError, match=message):
            regard.hf.from_pretrained(tmp_path)


# --- with other parts -------------------------------------------------------------------------------------------------


def test_unretrofit_restores_the_model():
    for name in ("llama", "gpt2"):
        model, given = build(name), inputs_of(name)
        model.set_attn_implementation("sdpa")
        next(iter(model.parameters())).requires_grad_(False)
        config, state, flags = model.config.to_dict(), model.state_dict(), [p.requires_grad for p in model.parameters()]
        hooks = [len(m._forward_pre_hooks) for m in model.modules()]
        before = logits(model, "sdpa", given)
        randomize(regard.hf.retrofit(model, freeze=True))
        assert regard.hf.unretrofit(model) is model
        assert model.config._attn_implementation == "sdpa" and model.config.to_dict() == config
        assert model.state_dict().keys() == state.keys() and [p.requires_grad for p in model.parameters()] == flags
        assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks and "_before_retrofit" not in vars(model)
        with torch.no_grad():
            assert torch.equal(model(**given).logits, before)
        regard.hf.retrofit(model)  # and it can be retrofitted again


def test_a_copy_is_a_model_of_its_own():
    model, given = randomize(retrofitted("llama")), inputs_of("llama")
    expected = logits(model, "regard", given)
    copied = copy.deepcopy(model)
    regard.hf.unretrofit(model)
    assert torch.equal(logits(copied, "regard", given), expected)
    assert not torch.allclose(logits(model, "regard", given), expected, atol=1e-3)
    assert regard.hf.unretrofit(copied).config._attn_implementation == "sdpa"


def test_another_implementation_raises():
    model, given = retrofitted("llama"), inputs_of("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"attn_implementation: expected one of regard's .* got 'sdpa'"):
        model(**given)


def test_an_inspection_sees_the_retrofitted_problem():
    model, tokens = randomize(retrofitted("llama")), inputs_of("llama")["input_ids"]
    found = regard.inspect(model, tokens, patterns=True)
    assert model.config._attn_implementation == "regard"
    assert len(regard.hf.check(model)) == 2
    # Layer 0 from its own calls: the plan is that of the retrofitted problem.
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.hf.calls.attention", lambda **call: calls.append(call) or regard.attention(**call))
        logits(model, "regard", {"input_ids": tokens})
    call = {k: v for k, v in calls[0].items() if k != "return_aux"}
    assert call["problem"].marginal.sink is not None
    _, aux = regard.attention(**call, return_aux=regard.AuxRequest(entropy=True, mass=True))
    assert torch.allclose(found.mean("entropy")[0], aux.entropy.mean((0, 2)).double(), atol=1e-5)
    mass = found.mean("mass")
    assert torch.allclose(mass[0], aux.mass.mean((0, 2)).double(), atol=1e-5)
    assert mass[:, 0].max() < 0.999 and torch.allclose(
        mass[:, 1], torch.ones(2, dtype=torch.float64)
    )  # head 1: no null key
    fresh = regard.inspect(retrofitted("llama"), tokens)
    plain = regard.inspect(build("llama"), tokens)
    assert torch.allclose(fresh.mean("normalized_entropy"), plain.mean("normalized_entropy"), atol=1e-5)


def test_watching_a_training_step_changes_no_gradient():
    for model in (retrofitted("llama").double(), randomize(retrofitted("llama")).double()):
        given = inputs_of("llama")
        expected = gradients(model, given)
        with regard.watch(model) as record:
            found = gradients(model, given)
        assert record.rows == 40
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, atol=1e-12), name


@pytest.mark.parametrize(
    ("name", "learn", "options", "message"),
    [
        ("llama", ("heat",), {}, "learn: expected some of temperature, sink, bias, got 'heat'"),
        ("llama", (), {}, "learn: expected some of temperature, sink, bias, got none"),
        ("llama", 3, {}, "learn: expected some of temperature, sink, bias, got 3"),
        ("gpt_oss", ALL, {}, 'learn: expected no "sink" for a model that has sinks of its own, got model.layers.0'),
        ("t5", "bias", {}, 'learn: expected no "bias" for an encoder-decoder'),
        ("llama", "bias", {"inputs": torch.zeros(1, 4).long()}, 'inputs: expected None without "sink"'),
    ],
)
def test_what_cannot_be_learned_raises(name, learn, options, message):
    model = build(name)
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        regard.hf.retrofit(model, learn, **options)
    assert model.config.to_dict() == before and not any(isinstance(m, Retrofit) for m in model.modules())


def test_errors():
    model = retrofitted("llama")
    with pytest.raises(ValueError, match="model: expected one that is not retrofitted yet"):
        regard.hf.retrofit(model)
    for use in (regard.hf.unretrofit, regard.hf.retrofitted_parameters):
        with pytest.raises(ValueError, match=r"model: expected one that regard\.hf\.retrofit has changed, got Llama"):
            use(build("llama"))
    with pytest.raises(ValueError, match="bypasses"):
        regard.hf.retrofit(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["t5", "whisper", "vit"])
def test_encoders_and_encoder_decoders(name):
    model, given = build(name), inputs_of(name)
    before = logits(model, "regard", given)
    regard.hf.retrofit(model, ("temperature", "sink") if name != "vit" else ALL)
    with torch.no_grad():
        got = model(**given).logits
    assert torch.allclose(got, before, atol=1e-4 * float(before.abs().max()))
    with torch.no_grad():
        assert not torch.allclose(randomize(model)(**given).logits, before, atol=1e-2)
