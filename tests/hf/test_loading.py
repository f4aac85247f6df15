"""`regard.hf.load`: the class of a checkpoint, which weights may be missing, and names without a network."""

import json
import logging
import socket
import threading
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import regard
from regard.hf import hub
from support.models import TEXT

ALBERT = TEXT | {"embedding_size": 16, "num_hidden_layers": 4}


def _saved(folder, model, **changes):
    """The folder with this checkpoint; `changes` of its config.json (None: the entry is removed)."""
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return str(folder)


def _without(folder, part):
    """The same checkpoint without the weights whose names contain this."""
    file = f"{folder}/model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if part not in name}
    save_file(kept, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("model", "changes", "kind"),
    [
        (lambda: transformers.BertModel(transformers.BertConfig(**TEXT)), {}, "BertModel"),
        (
            lambda: transformers.BertModel(transformers.BertConfig(**TEXT)),
            {"architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM",
        ),
        (
            lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
            {"architectures": None},
            "BertModel",
        ),
        (
            lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
            {"architectures": ["NobodysModel", "os"]},
            "BertModel",
        ),
        (lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**ALBERT)), {}, "AlbertForMaskedLM"),
        (
            lambda: transformers.AlbertModel(transformers.AlbertConfig(**ALBERT)),
            {"architectures": ["AlbertForSequenceClassification"]},
            "AlbertForSequenceClassification",
        ),
        (lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT)), {}, "RobertaModel"),
    ],
    ids=["bert", "bert-masked-lm", "bert-unnamed", "bert-unknown", "albert", "albert-base", "roberta"],
)
def test_encoders_are_loaded_by_the_class_that_their_configuration_names(model, changes, kind, tmp_path):
    torch.manual_seed(0)
    saved = model()
    folder = _saved(tmp_path, saved, **changes)
    shown = []
    listening = logging.Handler()
    listening.emit = shown.append
    transformers.logging.add_handler(listening)
    loaded, tokenizer = regard.hf.load(folder)
    transformers.logging.remove_handler(listening)
    assert shown == []  # transformers' table of missing weights
    assert type(loaded).__name__ == kind and tokenizer is None and not loaded.training
    mine, theirs = loaded.base_model.state_dict(), saved.base_model.state_dict()
    body = {name for name in mine.keys() & theirs.keys() if "pooler" not in name}
    assert len(body) >= len([name for name in theirs if "pooler" not in name])
    assert all(torch.equal(mine[name], theirs[name]) for name in body)
    seen = regard.inspect(loaded, torch.randint(64, (1, 20)))
    assert len(seen.layers) == loaded.config.num_hidden_layers


@pytest.mark.parametrize(
    "part", ["layer.1.attention.self.query.weight", "word_embeddings", "layer.0.output.dense.bias", "LayerNorm"]
)
@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_missing_weights_before_the_head_raise(architecture, part, tmp_path):
    folder = _saved(tmp_path, transformers.BertModel(transformers.BertConfig(**TEXT)), architectures=[architecture])
    regard.hf.load(_without(folder, "pooler"))
    with pytest.raises(ValueError, match=rf"has no weights for \d+ parameters, such as .*{part}"):
        regard.hf.load(_without(folder, part))


def test_a_language_model_keeps_its_head(tmp_path):
    config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=False)
    folder = _saved(tmp_path, transformers.LlamaForCausalLM(config))
    assert type(regard.hf.load(folder)[0]) is transformers.LlamaForCausalLM
    regard.hf.load(_without(folder, "lm_head"))
    with pytest.raises(ValueError, match=r"no weights for 1 parameters, such as model\.layers\.1\.self_attn\.q_proj"):
        regard.hf.load(_without(folder, "layers.1.self_attn.q_proj"))


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(tmp_path):
    """A class of the checkpoint's own, beside a class of transformers that its configuration names."""
    mapped = {"AutoModelForMaskedLM": "own.Own"}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))
    folder = _saved(tmp_path, model, auto_map=mapped)
    (tmp_path / "own.py").write_text("import transformers\nclass Own(transformers.BertForMaskedLM): pass\n")
    assert type(regard.hf.load(folder)[0]) is transformers.BertForMaskedLM
    assert type(regard.hf.load(folder, trust_remote_code=True)[0]).__name__ == "Own"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    """Addresses to which a connection was tried; none succeeds."""
    asked = []

    def refused(address, timeout):
        asked.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.socket, "create_connection", refused)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    return asked


def test_a_name_without_a_network_fails_at_once(no_network):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"'nobody/no-such' is neither a folder nor in the cache, and .* be reached"):
        regard.hf.load("nobody/no-such")
    assert time.monotonic() - began < 2 and no_network == [("huggingface.co", 443)]


def test_a_machine_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    answer = threading.Event()
    monkeypatch.setattr(hub.socket, "create_connection", lambda address, timeout: answer.wait(5) and socket.socket())
    began = time.monotonic()
    with pytest.raises(ValueError, match="cannot be reached"):
        regard.hf.locate("nobody/no-such")
    assert time.monotonic() - began < 2
    answer.set()


def test_offline_by_choice(monkeypatch, no_network):
    monkeypatch.setattr(hub.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        regard.hf.locate("nobody/no-such")
    assert no_network == []


def test_a_cached_model_needs_no_network(monkeypatch, no_network):
    monkeypatch.setattr(hub.huggingface_hub, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    assert regard.hf.locate("nobody/cached") == ("nobody/cached", {"local_files_only": True})


def test_a_proxy_is_asked_instead(monkeypatch, no_network):
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://proxy.example:3128"})
    with pytest.raises(ValueError, match="cannot be reached"):
        regard.hf.locate("nobody/no-such")
    assert no_network == [("proxy.example", 3128)]


def test_a_reachable_hub_decides_itself(monkeypatch):
    listening = socket.create_server(("127.0.0.1", 0))
    with listening:
        monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
        monkeypatch.setattr(hub.huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert regard.hf.locate("nobody/no-such") == ("nobody/no-such", {})


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/no-such-folder", "nowhere.gguf"])
def test_paths_are_not_looked_up_on_the_hub(name, no_network):
    with pytest.raises(ValueError, match="nothing is at"):
        regard.hf.locate(name)
    assert no_network == []


def test_a_folder_without_a_model(tmp_path, no_network):
    with pytest.raises(ValueError, match=r"expected a folder with a config.json, got '.*', which has none"):
        regard.hf.load(str(tmp_path))
    assert no_network == []
