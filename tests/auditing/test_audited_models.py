"""`regard.hf.audit` and the command `regard audit`."""

import json

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import regard
from regard.cli import app
from support.models import MODELS


def model_of(name):
    kind, config, _ = MODELS[name]
    config = config()
    config.initializer_range = 0.3
    torch.manual_seed(0)
    return kind(config).eval()


@pytest.fixture
def swallowing():
    """An implementation that was registered without a mask function, and that swallows sinks and softcaps."""

    def function(module, query, key, value, attention_mask, s_aux=None, softcap=None, **kwargs):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("swallowing", function)
    yield "swallowing"
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping["swallowing"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_stock_implementations_pass(name):
    regard.hf.register()
    model = model_of(name)
    before = model.config._attn_implementation
    found = regard.hf.audit(model, ("sdpa", "eager", "regard"))
    assert found.passed and not found.findings, str(found)
    assert {"eager: plain", "eager: left padding", "regard: right padding"} <= set(found.cases)
    if name not in ("bert", "t5"):
        assert {"eager: packed", "regard: generate, dynamic cache", "eager: generate, static cache"} <= set(found.cases)
    if name in ("gemma2", "gpt_oss"):  # transformers has no sdpa for them
        assert [refusal.case for refusal in found.refusals] == ["sdpa"]
    assert model.config._attn_implementation == before


def test_a_mask_that_nobody_makes(swallowing):
    """Without a mask function transformers passes no mask, and says nothing (transformers PR 45811)."""
    found = regard.hf.audit(model_of("llama"), (swallowing,))
    by_name = {finding.name: finding for finding in found.findings}
    assert set(by_name) == {"mask-dropped", "documents-dropped"}, str(found)
    finding = by_name["mask-dropped"]
    assert finding.layer == "model.layers.0.self_attn" and finding.layers == 2
    assert finding.argument == "attention_mask" and finding.harm > 1
    assert "padding is read" in finding.message and "logits change" in finding.message


def test_sinks_that_are_swallowed(swallowing):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    ALL_MASK_ATTENTION_FUNCTIONS.register(swallowing, sdpa_mask)
    try:
        found = regard.hf.audit(model_of("gpt_oss"), (swallowing,))
        capped = regard.hf.audit(model_of("gemma2"), (swallowing,), torch.randint(3, 60, (1, 20)))
    finally:
        del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping[swallowing]
    (finding,) = found.findings
    assert (finding.name, finding.argument) == ("sink-dropped", "s_aux") and finding.implementation == swallowing
    assert [f.name for f in capped.findings] == ["softcap-dropped"] and capped.cases == ("swallowing: your inputs",)
    assert json.loads(found.to_json())["findings"][0]["argument"] == "s_aux"


def test_a_mistake_in_one_layer():
    """The finding names the layer, in every scenario."""

    def function(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scaling = 1.0 if module.layer_idx == 1 else scaling
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    ALL_ATTENTION_FUNCTIONS.register("second layer", function)
    ALL_MASK_ATTENTION_FUNCTIONS.register("second layer", sdpa_mask)
    try:
        (finding,) = regard.hf.audit(model_of("llama"), ("second layer",)).findings
    finally:
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping["second layer"]
        del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["second layer"]
    assert (finding.name, finding.layer, finding.layers) == ("scale-missing", "model.layers.1.self_attn", 1)
    assert finding.harm > 0.1 and len(finding.cases) == 6


def test_kinds_of_caches(monkeypatch):
    """Which caches `generate` is run with, by device and by what is installed."""
    from regard.hf import auditing

    monkeypatch.setattr(auditing, "is_optimum_quanto_available", lambda: False)
    assert auditing.caches(torch.device("cpu")) == ["dynamic", "static"]
    assert auditing.caches(torch.device("cuda")) == ["dynamic", "static", "offloaded", "offloaded_static"]
    monkeypatch.setattr(auditing, "is_optimum_quanto_available", lambda: True)
    assert auditing.caches(torch.device("cpu")) == ["dynamic", "static", "quantized"]


def test_a_configuration():
    found = regard.hf.audit(transformers.GptOssConfig(), ("eager",))
    assert found.passed and len(found.cases) == 6
    small = regard.hf.small_model(transformers.Gemma2Config())
    assert small.num_parameters() < 1e6 and small.config.layer_types == ["sliding_attention", "full_attention"]


def test_refusals():
    found = regard.hf.audit(model_of("llama"), ("no_such_thing",))
    assert not found.passed and [f.name for f in found.findings] == ["nothing-ran"]
    with pytest.raises(TypeError, match="implementations: expected names"):
        regard.hf.audit(model_of("llama"), "sdpa")
    with pytest.raises(ValueError, match="inputs: expected the arguments of ViT"):
        regard.hf.audit(model_of("vit"))


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_command_on_a_function(tmp_path):
    out = tmp_path / "audit.json"
    done = command("torch.nn.functional:scaled_dot_product_attention", "--no-gradients", "--json", str(out))
    assert done.exit_code == 1, done.stderr
    assert "scaled_dot_product_attention FAILED" in done.stdout and "masked-nan" in done.stdout
    assert json.loads(out.read_text())["passed"] is False
    done = command("support.mutants:attend", "--problem", "Transport(prior=Causal())", "--no-gradients")
    assert done.exit_code == 0 and "attend passed" in done.stdout, done.stdout + done.stderr


def test_command_on_a_model(tmp_path):
    """A folder with a configuration alone: a small model with random weights."""
    transformers.MistralConfig(architectures=["MistralForCausalLM"]).save_pretrained(tmp_path)
    done = command(str(tmp_path), "--implementation", "sdpa")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "MistralForCausalLM under sdpa passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no.such.module:f",), "cannot be imported"),
        (("torch:no_such_function",), "expected a function of torch"),
        (("torch.nn.functional:softmax", "--dtype", "int8"), "--dtype: expected one of"),
        (("torch.nn.functional:softmax", "--problem", "open('x')"), "problem: expected"),
        (("torch.nn.functional:softmax", "--implementation", "sdpa"), "--implementation: expected a model"),
    ],
)
def test_command_refuses(arguments, message):
    done = command(*arguments)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr
