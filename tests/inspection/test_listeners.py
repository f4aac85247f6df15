"""Several listeners on one model, and on models that share a configuration: each records what it would alone."""

import copy
import json

import pytest
import torch
from torch import nn

import regard

transformers = pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

TOKENS = torch.arange(2 * 12).view(2, 12) * 7 % 50
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, :4] = 0


def llama(seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, **options
    )
    return LlamaForCausalLM(config).train()


def step(model):
    return model(TOKENS, attention_mask=MASK, labels=TOKENS).loss


def sampled(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.startswith("attn/")} for line in lines if "step" in line]


def same(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-5, abs=1e-7) for k in a)


def floored(model):
    """The entropies and the gradient of their floor, without another listener."""
    with regard.hf.entropies(model) as rows:
        step(model)
        loss = rows.floor(3.0)
    (grad,) = torch.autograd.grad(loss, model.model.layers[0].self_attn.q_proj.weight)
    return [e.entropy.detach() for e in rows], grad


@pytest.mark.parametrize("outer", ["monitor", "entropies"])
def test_a_monitor_and_an_entropy_floor_in_one_step(outer, tmp_path):
    model = llama()
    entropies, gradient = floored(model)
    alone = regard.Monitor(model, every=1, path=tmp_path / "alone.jsonl")
    with alone(0):
        alone_loss = step(model)
    alone.log(alone_loss)
    alone.close()
    monitor = regard.Monitor(model, every=1, path=tmp_path / "both.jsonl")
    for number in range(2):
        if outer == "monitor":
            with monitor(number), regard.hf.entropies(model) as rows:
                loss = step(model)
                floor = rows.floor(3.0)
        else:
            with regard.hf.entropies(model) as rows, monitor(number):
                loss = step(model)
                floor = rows.floor(3.0)
        (found,) = torch.autograd.grad(floor, model.model.layers[0].self_attn.q_proj.weight)
        monitor.log(loss)
        torch.testing.assert_close(loss, alone_loss)
        torch.testing.assert_close([e.entropy.detach() for e in rows], entropies)
        torch.testing.assert_close(found, gradient)
        assert model.config._attn_implementation == "sdpa"
    monitor.close()
    same(sampled(tmp_path / "both.jsonl"), 2 * sampled(tmp_path / "alone.jsonl"))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_listeners_may_end_in_any_order():
    model = llama().eval()
    with regard.watch(model) as alone:
        step(model)
    first, second = regard.watch(model), regard.watch(model)
    a = first.__enter__()
    b = second.__enter__()
    step(model)
    first.__exit__(None, None, None)
    step(model)  # the second still records
    second.__exit__(None, None, None)
    step(model)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(a.layers[1].sums, alone.layers[1].sums)
    torch.testing.assert_close(b.layers[1].sums, 2 * alone.layers[1].sums)


def test_another_model_with_the_same_configuration_is_not_recorded():
    student = llama()
    teacher = LlamaForCausalLM(student.config)
    assert teacher.config is student.config
    expected = teacher(TOKENS).logits
    with regard.watch(student) as record:
        step(student)
        torch.testing.assert_close(teacher(TOKENS).logits, expected)
    assert [layer.name for layer in record.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [layer.calls for layer in record.layers] == [1, 1]


@pytest.mark.parametrize("first", ["student", "teacher"])
def test_two_models_with_one_configuration_are_both_recorded(first):
    student = llama()
    teacher = LlamaForCausalLM(student.config)
    models = (student, teacher) if first == "student" else (teacher, student)
    with regard.watch(models[0]) as below, regard.watch(models[1]) as above:
        step(student)
        teacher(TOKENS)
    for record in (below, above):
        assert [layer.calls for layer in record.layers] == [1, 1]
    rows = {int(record.layers[0].rows[:, 0].sum()) for record in (below, above)}
    assert rows == {int(MASK.sum()), TOKENS.numel()}


def test_a_listener_that_begins_again_on_top_records_once(tmp_path):
    model = llama().eval()
    with regard.watch(model) as alone:
        step(model)
    monitor = regard.Monitor(model, every=1, evaluation=True, path=tmp_path / "run.jsonl")
    other = regard.watch(model)
    monitor.start(0)
    step(model)
    record = other.__enter__()
    monitor.stop()
    monitor.start(1)
    step(model)
    assert [layer.calls for layer in monitor.listener.layers] == [1, 1]
    monitor.stop()
    other.__exit__(None, None, None)
    monitor.close()
    torch.testing.assert_close(record.layers[1].sums, alone.layers[1].sums)
    assert model.config._attn_implementation == "sdpa"


def test_key_mass_of_padded_batches_under_checkpointing():
    model = llama()
    with torch.no_grad(), regard.watch(model, statistics=("key_mass",)) as plain:
        step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with regard.watch(model, statistics=("key_mass",)) as record:
        step(model).backward()
    for a, b in zip(record.layers, plain.layers, strict=True):
        torch.testing.assert_close(a.key_sums, b.key_sums)


def test_a_hidden_gradient_raises_also_inside_a_wrapper():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, **batch):
            return self.model(**batch)

    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    wrapped = Wrapper(model)
    with pytest.raises(RuntimeError, match="use_reentrant=False"), regard.hf.entropies(wrapped):
        wrapped(input_ids=TOKENS, attention_mask=MASK, labels=TOKENS)


def test_a_small_null_weight_is_a_small_change():
    model = llama().eval()
    regard.hf.retrofit(model, learn="sink")
    before = regard.inspect(model, TOKENS).layers[0].means()["normalized_entropy"]
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.retrofit.null_weight")[3] = 1e-6
    after = regard.inspect(model, TOKENS).layers[0].means()["normalized_entropy"]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    with regard.hf.entropies(model) as rows:
        model(TOKENS)
        assert rows.floor(0.5, relative=True) < 1e-4


def test_features_and_retrofit_exclude_each_other():
    regard.hf.register("listeners-linear", regard.features.LinearAttention())
    model = llama().eval()
    plain = copy.deepcopy(model)
    regard.hf.retrofit(model, learn="temperature")
    for config in regard.hf.configurations_of(model):
        config._attn_implementation_internal = "listeners-linear"
    with pytest.raises(ValueError, match="retrofitted"):
        regard.inspect(model, TOKENS)
    plain.set_attn_implementation("listeners-linear")
    with pytest.raises(ValueError, match="features"):
        regard.hf.retrofit(plain)


def test_qk_clip_raises_for_an_unknown_norm():
    attention = llama().model.layers[0].self_attn
    attention.q_layernorm = nn.LayerNorm(8)
    with pytest.raises(ValueError, match="q_layernorm"):
        regard.nn.qk_clip_(attention, torch.full((4,), 200.0))


def test_a_new_run_on_an_old_file_has_a_new_header(tmp_path):
    path = tmp_path / "run.jsonl"
    for every, width in ((1, 32), (2, 32)):
        model = llama(seed=width)
        monitor = regard.Monitor(model, every=every, path=path)
        for number in range(4):
            with monitor(number):
                loss = step(model)
            monitor.log(loss)
        monitor.close()
    header = json.loads(path.read_text().splitlines()[0])
    assert header["every"] == 2
    assert [json.loads(line)["step"] for line in path.read_text().splitlines() if "attn/" in line] == [0, 2]


def test_a_run_file_with_missing_fields_raises(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "bad.st", metadata={"regard.inspection": json.dumps({"layers": []})})
    with pytest.raises(ValueError, match=r"expected a run file that Inspection.save wrote, .*it has no 'version'"):
        regard.inspection.Inspection.load(tmp_path / "bad.st")
