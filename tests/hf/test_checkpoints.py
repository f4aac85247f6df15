"""The problem of a registered model in its checkpoint: saved, required, and never lost silently."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import regard
from regard import Rows, Transport, Tsallis
from regard.hf import checkpoints, registry

PROBLEM = Transport(Tsallis(1.5), marginal=Rows(sink=torch.tensor([0.1, 0.2, 0.3, 0.4])))
IDS = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(0))


def llama(implementation="eager"):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, **shape)
    config._attn_implementation = implementation
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of a model with a registered problem, and the logits of the model."""
    model = llama(regard.hf.register("regard-saved", PROBLEM))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        return tmp_path, model(IDS).logits


@pytest.fixture
def forgotten(folder):
    """The same in a process that has not registered the problem."""
    del registry._problems["regard-saved"]
    registry.remove("regard-saved")
    yield folder
    regard.hf.register("regard-saved", PROBLEM)


def entry(folder):
    return json.loads((folder / "config.json").read_text()).get("regard_problem")


def test_the_configuration_has_the_problem(folder):
    path, _ = folder
    saved = entry(path)
    assert saved["name"] == "regard-saved" and saved["text"] == repr(PROBLEM)
    assert torch.equal(Transport.from_json(saved["problem"]).marginal.sink, PROBLEM.marginal.sink)


def test_a_stock_model_has_no_entry(tmp_path):
    regard.hf.register()
    for implementation in ("eager", "sdpa", "regard"):  # "regard" is softmax, which every implementation computes
        llama(implementation).save_pretrained(tmp_path)
        assert entry(tmp_path) is None


def test_the_entry_follows_the_implementation(folder):
    """It is written from the model that is saved, not kept from the checkpoint that was loaded."""
    path, _ = folder
    model = LlamaForCausalLM.from_pretrained(path, attn_implementation="regard-saved")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(path)
    assert entry(path) is None
    model.set_attn_implementation("regard-saved")
    model.save_pretrained(path)
    assert entry(path)["name"] == "regard-saved" and not hasattr(model.config, "regard_problem")
    LlamaForCausalLM(model.config)


def test_a_model_is_saved_while_it_is_watched(folder):
    path, _ = folder
    model = llama("regard-saved")
    with regard.watch(model), regard.watch(model):
        model.save_pretrained(path)
    assert entry(path)["name"] == "regard-saved"


def test_loading_restores_the_attention(folder):
    path, expected = folder
    for model in (
        LlamaForCausalLM.from_pretrained(path, attn_implementation="regard-saved").eval(),
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="regard-saved").eval(),
        regard.hf.from_pretrained(path).eval(),
        regard.hf.load(str(path))[0],
    ):
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, expected)
        assert model.config._attn_implementation == "regard-saved"


def test_another_attention_raises(folder):
    path, _ = folder
    for kwargs in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises(ValueError, match=r"expected 'regard-saved', because the checkpoint.*remove regard_problem"):
            LlamaForCausalLM.from_pretrained(path, **kwargs)
    config = AutoConfig.from_pretrained(path)
    del config.regard_problem
    assert LlamaForCausalLM.from_pretrained(path, config=config).config._attn_implementation == "sdpa"


def test_a_problem_that_is_not_registered_raises_with_the_remedy(forgotten):
    path, expected = forgotten
    message = r"expected 'regard-saved', registered with Transport\(Tsallis\(1.5\), .*got no such name; call regard"
    for load in (LlamaForCausalLM.from_pretrained, regard.hf.from_pretrained, lambda path: regard.hf.load(str(path))):
        with pytest.raises(ValueError, match=message) as raised:
            load(path)
    config = AutoConfig.from_pretrained(path)
    remedy = str(raised.value).partition("; call ")[2].partition(" before you load")[0]
    eval(remedy, {"regard": regard, "config": config})  # what the message says works
    with torch.no_grad():
        assert torch.equal(regard.hf.from_pretrained(path).eval()(IDS).logits, expected)


def test_another_problem_of_the_name_raises(folder):
    path, _ = folder
    try:
        regard.hf.register("regard-saved", Transport(Tsallis(2.0)))
        with pytest.raises(ValueError, match=r"registered with .*1.5.*, got Transport\(Tsallis\(2.0\)\)"):
            regard.hf.from_pretrained(path)
        other = Transport(Tsallis(1.5), marginal=Rows(sink=torch.tensor([0.1, 0.2, 0.3, 0.5])))  # the same repr
        regard.hf.register("regard-saved", other)
        with pytest.raises(ValueError, match="registered with"):
            regard.hf.from_pretrained(path)
    finally:
        regard.hf.register("regard-saved", PROBLEM)


def test_a_problem_that_json_cannot_express(tmp_path):
    own = regard.FDivergence(lambda x: x * x / 2, torch.relu, lower=0.0)
    for name, problem in (("regard-lambda", Transport(own)), ("regard-linear", regard.features.LinearAttention())):
        model = llama(regard.hf.register(name, problem))
        model.save_pretrained(tmp_path)
        assert entry(tmp_path) == {"name": name, "text": repr(problem), "problem": None}
        assert regard.hf.from_pretrained(tmp_path).config._attn_implementation == name
        kept = registry._problems.pop(name)
        with pytest.raises(ValueError, match=rf"got no such name; call regard.hf.register\('{name}', its problem\)"):
            regard.hf.from_pretrained(tmp_path)
        registry._problems[name] = kept


def test_load_gives_a_problem_of_your_own(forgotten):
    path, expected = forgotten
    model, _ = regard.hf.load(str(path), problem=PROBLEM)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
        softmax, _ = regard.hf.load(str(path), problem=Transport())
        assert not torch.allclose(softmax(IDS).logits, expected, atol=1e-4)


def test_a_retrofitted_model_keeps_its_problem(folder):
    path, _ = folder
    model = llama("regard-saved")
    regard.hf.retrofit(model, "temperature")
    regard.hf.retrofitted_parameters(model)[0].data.fill_(0.5)
    model.save_pretrained(path)
    with torch.no_grad():
        expected = model(IDS).logits
        for loaded in (regard.hf.from_pretrained(path), regard.hf.load(str(path))[0]):
            assert torch.equal(loaded.eval()(IDS).logits, expected)


def test_inspect_notices_a_model_that_was_loaded_without_its_problem(folder):
    """In a process that loads the model before it uses regard.hf, transformers knows nothing of the entry."""
    path, _ = folder
    program = f"""
import torch, transformers, regard
model = transformers.LlamaForCausalLM.from_pretrained({str(path)!r})
try:
    regard.inspect(model, torch.zeros(1, 5, dtype=torch.long))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "expected 'regard-saved', registered with Transport(Tsallis(1.5)" in done.stdout, done


def test_an_invalid_entry_raises(folder):
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    for wrong in ("regard-saved", {"problem": "x"}, {"name": 3}):
        (path / "config.json").write_text(json.dumps(config | {checkpoints.ENTRY: wrong}))
        with pytest.raises(ValueError, match="config: expected the entry regard_problem with a name"):
            regard.hf.from_pretrained(path)
