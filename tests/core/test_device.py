"""The lab on a device other than the CPU: every tensor of an experiment is there, and the numbers are the same."""

import math

import pytest
import torch

from regard.lab import distributed, runner
from regard.lab.experiments import NAMES, load
from regard.lab.runner import Run
from regard.nn import Transformer
from support.fake_device import DEVICE, Elsewhere, Mixed, pretended
from support.lab import TEXT

TINY = {
    "seeds": 1, "steps": 2, "every": 2, "warmup": 1, "batch": 2, "length": 8, "layers": 1, "heads": 1, "width": 8,
    "evaluate": 2, "sizes": [8], "depths": [1], "pairs": 2, "symbols": 8, "digits": 1, "prefixes": 2, "prompts": 2,
    "characters": 10, "lengths": [8], "turns": 1, "turn_steps": 1, "draws": 10, "models": ["own"],
}  # fmt: skip
SETTINGS = {  # settings that differ in the tensors they create; of other experiments all settings run
    "baseline": ["regard", "time"],
    "scaling": ["init unit, d 8, scaled", "init unit, d 8, natural gradient", "init unit, d 8, QK-norm"],
    "masking": ["minus infinity", "mask to zero"],
    "normalizer": ["entmax-1.5", "sigmoid", "ReLU, normalised", "Performer"],
    "recall": ["recall: softmax", "copying: linear (elu + 1)", "addition: ReLU features"],
    "sinks": ["backcopy, 1 layer: null key", "text: relaxed rows"],
}


def run_on(device, name, folder):
    """The results of some cells of the experiment."""
    experiment = load(name)
    config = {**experiment.quick, **{n: v for n, v in TINY.items() if n in experiment.quick}}
    run = Run(experiment, config, TEXT, folder, "quick", device=device)
    found = []
    for setting in SETTINGS.get(name, experiment.settings(config)):
        run.measure(setting, 0)
        found.append(run.result(setting, 0))
    return found


def numbers(value):
    if isinstance(value, dict):
        return [x for n, v in value.items() if n not in ("seconds", "ratios", "steps_per_second") for x in numbers(v)]
    if isinstance(value, list):
        return [x for v in value for x in numbers(v)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_follows_its_device(name, tmp_path, monkeypatch):
    seen = []
    forward = Transformer.forward

    def watched(self, tokens):
        out = forward(self, tokens)
        seen.extend([tokens.device, out.device, *(parameter.device for parameter in self.parameters())])
        return out

    monkeypatch.setattr(Transformer, "forward", watched)
    here = run_on(torch.device("cpu"), name, tmp_path / "here")
    seen.clear()
    with pretended():
        away = run_on(DEVICE, name, tmp_path / "away")
    assert set(seen) == {DEVICE}
    for one, other in zip(here, away, strict=True):
        a, b = (torch.tensor(numbers(o.result), dtype=torch.float64) for o in (one, other))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda said, o=other: f"{o.setting}: {said}")
        assert [r["step"] for r in one.metrics] == [r["step"] for r in other.metrics]


def test_tensors_left_on_the_cpu_are_detected():
    with pretended():
        away = torch.ones(3, device=DEVICE)
        assert type(away) is Elsewhere and type(away + 1) is Elsewhere and (away + 1).sum().item() == 6
        assert type(away.cpu()) is torch.Tensor and (away * torch.tensor(2.0)).tolist() == [2, 2, 2]
        with pytest.raises(Mixed, match=r"aten.add.Tensor: tensors on meta and on the CPU, of shapes \[\[3\]\]"):
            away.add(torch.ones(3))
        model = Transformer(5, 4, layers=1, heads=1, width=4).to(DEVICE)
        with pytest.raises(Mixed):
            model(torch.zeros(1, 4, dtype=torch.long))


# --- which device -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the machine has four GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")


@pytest.mark.usefixtures("gpus")
def test_each_process_takes_its_gpu(monkeypatch):
    joined = []
    monkeypatch.setattr(torch.cuda, "set_device", joined.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined.append)
    assert distributed.device_named("auto") == torch.device("cuda:0")
    assert distributed.device_named("cuda:3") == torch.device("cuda:3")
    assert distributed.device_named("cpu") == torch.device("cpu")
    assert runner.versions(torch.device("cuda:2"))["device"] == "GPU 2" and runner.versions()["device"] == "cpu"
    with pytest.raises(ValueError, match="expected at least 5 CUDA GPUs for 'cuda:4', found 4"):
        distributed.device_named("cuda:4")
    distributed.join(torch.device("cuda:3"))
    assert joined == [torch.device("cuda:3")]  # a single process has no group to join
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    mine = distributed.device_named("cuda")
    assert mine == torch.device("cuda:2")
    distributed.join(mine)
    distributed.join(torch.device("cpu"))  # also on a machine with GPUs
    assert joined[1:] == [torch.device("cuda:2"), "cpu:gloo,cuda:nccl", "gloo"]
    with pytest.raises(ValueError, match="expected cuda under torchrun"):
        distributed.device_named("cuda:1")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "meta"])
def test_an_unknown_device_raises(name):
    with pytest.raises(ValueError, match="expected auto, cpu, cuda or cuda:n"):
        distributed.device_named(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_raises():
    assert distributed.device_named("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="expected at least 1 CUDA GPUs for 'cuda', found 0"):
        distributed.device_named("cuda")


# --- precision --------------------------------------------------------------------------------------------------------


def test_bf16_multiplies_in_bfloat16_and_keeps_float32(tmp_path, monkeypatch):
    seen = []
    forward = Transformer.forward

    def watched(self, tokens):
        out = forward(self, tokens)
        seen.append((self.training, out.dtype, self.token.weight.dtype))
        return out

    monkeypatch.setattr(Transformer, "forward", watched)
    losses = {}
    for precision in ("fp32", "bf16"):
        experiment = load("masking")
        config = {**experiment.quick, **{n: v for n, v in TINY.items() if n in experiment.quick}, "steps": 20}
        run = Run(experiment, config, TEXT, tmp_path / precision, "quick", precision=precision)
        run.open()
        assert runner.versions(precision=precision)["precision"] == precision
        run.measure("minus infinity", 0)
        losses[precision] = [record["val"] for record in run.result("minus infinity", 0).metrics]
        wanted = torch.bfloat16 if precision == "bf16" else torch.float32
        assert {s for s in seen if s[0]} == {(True, wanted, torch.float32)}
        seen.clear()
    assert losses["fp32"] != losses["bf16"]
    torch.testing.assert_close(torch.tensor(losses["fp32"]), torch.tensor(losses["bf16"]), rtol=2e-2, atol=0)
    assert all(map(math.isfinite, losses["bf16"]))
