"""`regard.hf.MonitorCallback` in transformers' Trainer, and `Monitor` in several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import regard
from regard import dispatch
from support import processes
from support.training import events, lines, llama, samples, tokens

TESTS = Path(__file__).resolve().parents[1]


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, n):
        ids = tokens(1, 12, seed=n)[0]
        mask = torch.ones(12, dtype=torch.long)
        mask[12 - n % 5 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def trained(folder, callback, resume=None, steps=12, model=None, **options):
    options = {"per_device_train_batch_size": 4, "save_steps": 6, "logging_steps": 1} | options
    torch.manual_seed(0)
    arguments = hf.TrainingArguments(
        output_dir=str(folder), max_steps=steps, report_to="none", learning_rate=1e-2, seed=0, use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip
    model = llama() if model is None else model
    callbacks = callback if isinstance(callback, list) else [callback]
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_steps_and_losses_are_the_trainers(tmp_path):
    callback = regard.hf.MonitorCallback(every=5)
    trainer = trained(tmp_path, callback, eval_strategy="steps", eval_steps=2)
    found = samples(tmp_path / "attention.jsonl")
    assert [line["step"] for line in found] == [1, 5, 10]
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    for line in found:
        assert line["loss"] == pytest.approx(logged[line["step"]]["loss"])
        assert line["grad_norm"] == pytest.approx(logged[line["step"]]["grad_norm"], rel=1e-5)
        assert 4 * 8 <= line["rows"] <= 4 * 12
    model = trainer.model
    assert model.config._attn_implementation == "sdpa" and dispatch.observers == []
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def test_accumulation_and_checkpointing_give_the_metrics_of_one_batch(tmp_path):
    trained(tmp_path / "plain", regard.hf.MonitorCallback(every=2), steps=4, per_device_train_batch_size=8)
    trained(
        tmp_path / "parts", regard.hf.MonitorCallback(every=2), steps=4, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, gradient_checkpointing=True,
    )  # fmt: skip
    plain, parts = (samples(tmp_path / name / "attention.jsonl") for name in ("plain", "parts"))
    assert [line["step"] for line in parts] == [1, 2, 4]
    for a, b in zip(plain, parts, strict=True):
        assert a["rows"] == b["rows"]
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-3), name  # after several optimizer steps


def test_a_compiled_training_has_the_metrics_of_a_plain_one(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    graphs = []

    class Count(hf.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trained(tmp_path / "plain", regard.hf.MonitorCallback(every=3))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained(tmp_path / "compiled", [regard.hf.MonitorCallback(every=3), Count()], **compiled)
    torch._dynamo.reset()
    plain, found = (samples(tmp_path / name / "attention.jsonl") for name in ("plain", "compiled"))
    assert [line["step"] for line in found] == [1, 3, 6, 9, 12]
    for a, b in zip(plain, found, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name
    assert graphs[3] > 0 and graphs[-1] == graphs[3]  # one compilation for sampled steps, one for the others


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_training_gives_the_same_lines(tmp_path, restore):
    options = {"thresholds": {"window": 8, "spike": 1.0, "max_score": 2.0}}  # so that there are events
    trained(tmp_path / "whole", regard.hf.MonitorCallback(every=3, **options))
    broken = tmp_path / "broken"
    trained(broken, regard.hf.MonitorCallback(every=3, **options))
    again = regard.hf.MonitorCallback(every=3, **options)
    trained(broken, again, str(broken / "checkpoint-6"), restore_callback_states_from_checkpoint=restore)
    whole, resumed = (lines(tmp_path / name / "attention.jsonl")[1:] for name in ("whole", "broken"))
    assert {e["step"] > 6 for e in events(tmp_path / "whole" / "attention.jsonl")} == {True, False}
    assert resumed == whole
    assert [line["step"] for line in lines(broken / "attention.jsonl.stale") if "event" not in line] == [9, 12]


def test_a_checkpoint_from_before_the_callback(tmp_path):
    trained(tmp_path, hf.TrainerCallback(), steps=6)
    trained(tmp_path, regard.hf.MonitorCallback(every=3), str(tmp_path / "checkpoint-6"))
    assert [line["step"] for line in samples(tmp_path / "attention.jsonl")] == [9, 12]


def test_tensorboard_if_the_trainer_reports_to_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = regard.hf.MonitorCallback(every=2, path=tmp_path / "run.jsonl")
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to="tensorboard", use_cpu=True, disable_tqdm=True,
        logging_steps=1, save_strategy="no", per_device_train_batch_size=2,
    )  # fmt: skip
    hf.Trainer(model=llama(), args=arguments, train_dataset=Texts(), callbacks=[callback]).train()
    [folder] = {path.parent for path in tmp_path.rglob("events.*") if path.parent.name == "attention"}
    scalars = EventAccumulator(str(folder)).Reload().Scalars("attn/entropy_norm/L00_p50")
    assert [s.step for s in scalars] == [1, 2]


def test_two_processes_give_the_metrics_of_one(tmp_path):
    """With torchrun each process has half of each batch. One all-reduce per sampled step joins them, and the first
    process writes. The processes agree on the layers before the first all-reduce and when one of them sees a new layer;
    a process may see none. If processes number their layers differently, all of them raise."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    subprocess.run(
        [*command, str(TESTS / "support" / "processes.py"), str(tmp_path), "reader", "late"],
        check=True, env=environment, capture_output=True, timeout=120,
    )  # fmt: skip
    assert processes.train(tmp_path, "reader") == processes.train_unequally(tmp_path) == []
    taken = {
        kind: [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in (0, 1)]
        for kind in ("reader", "late")
    }
    agree, add = "all_gather_object", "all_reduce"
    assert taken["reader"] == [[agree, add, add, add]] * 2
    for collectives in taken["late"]:
        assert collectives[:-1] == [agree, add, add, add, agree, add, add]
        assert "expected every process to see the same layers, but layer 0 is ('layers.0', 4" in collectives[-1]
    for kind, steps in (("reader", [0, 2, 4]), ("late", [0, 1, 2, 3])):
        two, one = (samples(tmp_path / f"{kind}-{world}.jsonl") for world in (2, 1))
        assert [line["step"] for line in two] == steps
        for a, b in zip(one, two, strict=True):
            assert a["rows"] == b["rows"] and a.keys() == b.keys()
            for name in a:
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
