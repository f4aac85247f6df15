"""The run file of a `Monitor`, and the trackers that it reports to."""

import pytest
import torch

from regard import Monitor
from support.training import lines, loss_of, reader, samples, tokens


def steps(path):
    return [line["step"] for line in samples(path)]


def go(model, path, first, last, every=2, state=None, **options):
    monitor = Monitor(model, every=every, path=path, **options)
    if state is not None:
        monitor.load_state_dict(state)
    for step in range(first, last):
        with monitor(step):
            loss = loss_of(model, tokens(2, 9, seed=step))
        monitor.log(loss)
    monitor.close()
    return monitor


def test_a_run_that_goes_back_moves_later_lines_aside(tmp_path):
    model, path = reader(), tmp_path / "run.jsonl"
    go(model, path, 0, 9)
    assert steps(path) == [0, 2, 4, 6, 8]
    go(model, path, 5, 7)
    assert steps(path) == [0, 2, 4, 6]
    assert [line["step"] for line in lines(tmp_path / "run.jsonl.stale")] == [6, 8]
    assert sum("format" in line for line in lines(path)) == sum("layers" in line for line in lines(path)) == 1


def test_an_incomplete_line_is_dropped(tmp_path):
    model, path = reader(), tmp_path / "run.jsonl"
    go(model, path, 0, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    go(model, path, 4, 7)
    assert steps(path) == [0, 2, 4, 6]
    path.write_bytes(b'{"format": "rega')  # incomplete in the first line
    go(model, path, 0, 3)
    assert steps(path) == [0, 2]


def test_another_file_is_not_changed(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(ValueError, match=r"expected a run file of regard\.Monitor"):
        Monitor(reader(), path=path)
    assert path.read_text() == '{"mine": 1}\n'


def test_a_folder_gets_a_file(tmp_path):
    go(reader(), tmp_path / "runs" / "first", 0, 1)
    assert steps(tmp_path / "runs" / "first" / "attention.jsonl") == [0]


def test_a_line_has_the_loss_logged_inside_or_after_the_step(tmp_path):
    model, path = reader(), tmp_path / "run.jsonl"
    monitor = Monitor(model, every=2, path=path)
    for step in range(5):
        with monitor():  # the next step
            loss = loss_of(model, tokens(2, 9, seed=step))
            if step == 0:
                monitor.log(loss, 0.5)  # inside
        if step == 1:
            monitor.log(7.0)
        if step == 2:
            monitor.log(loss.item(), torch.tensor(0.25))  # after
    monitor.close()  # step 4: never
    first, second, third = samples(path)
    assert (first["step"], first["grad_norm"]) == (0, 0.5) and first["loss"] > 0
    assert (second["step"], second["grad_norm"], second["loss_max"]) == (2, 0.25, 7.0)
    assert "loss" not in third and "loss_max" not in third


def test_tensorboard_receives_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        go(reader(), tmp_path / "run.jsonl", 0, 5, writer=writer, thresholds={"max_score": 1e-3})
    go(reader(), tmp_path / "other.jsonl", 0, 1, writer=tmp_path / "own")  # a folder: closed with the monitor
    book = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = samples(tmp_path / "run.jsonl")
    for name in ("attn/entropy_norm/L01_p10", "attn/max_score/L00", "max_attention_logit"):
        scalars = book.Scalars(name)
        assert [s.step for s in scalars] == [0, 2, 4]
        assert [s.value for s in scalars] == pytest.approx([line[name] for line in found], rel=1e-5)
    assert [s.step for s in book.Scalars("attn/event/logit-alarm")] == [0, 0]
    [text] = [book.Tensors(tag) for tag in book.Tags()["tensors"] if tag.startswith("attn/events")]
    [shown] = text[0].tensor_proto.string_val
    assert b"logit-alarm: largest score" in shown and b"Remedy: QK-clip" in shown
    assert EventAccumulator(str(tmp_path / "own")).Reload().Scalars("max_attention_logit")


class Run:
    """The part of a W&B run that we use: a row ends at a commit or at a later step."""

    def __init__(self):
        self.rows, self.row, self.step, self.metrics = {}, {}, 0, {}

    def define_metric(self, name, **options):
        self.metrics[name] = options

    def log(self, data, step=None, commit=None):
        if step is not None:
            assert step >= self.step, "W&B would drop this"
            if step > self.step:
                self._end(step)
        self.row |= data
        if commit or (commit is None and step is None):
            self._end(self.step + 1)

    def _end(self, step):
        if self.row:
            self.rows[self.step] = self.row
        self.row, self.step = {}, step


@pytest.mark.parametrize("user", ["explicit", "plain", "silent"])
def test_wandb_keeps_our_values_and_those_of_the_user(tmp_path, user):
    run, model = Run(), reader()
    monitor = Monitor(model, every=2, path=tmp_path / "run.jsonl", wandb=run)
    for step in range(6):
        with monitor(step):
            loss = loss_of(model, tokens(2, 9))
        monitor.log(loss)
        if user == "explicit":
            run.log({"mine": step}, step=step)
        elif user == "plain":
            run.log({"mine": step})
    monitor.close()
    run._end(10**6)
    ours = [row for row in run.rows.values() if "max_attention_logit" in row]
    assert [row["attn/step"] for row in ours] == [0, 2, 4]
    assert run.metrics["attn/*"]["step_metric"] == "attn/step"
    if user != "silent":
        assert [row["mine"] for row in run.rows.values() if "mine" in row] == list(range(6))


def test_wandb_itself(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="p", settings=wandb.Settings(console="off")) as run:
        go(reader(), tmp_path / "run.jsonl", 0, 5)  # the active run is found
        run.log({"mine": 1})  # also completes our last row
        assert run.summary["attn/step"] == 4
        assert run.summary["max_attention_logit"] == pytest.approx(
            samples(tmp_path / "run.jsonl")[-1]["max_attention_logit"], rel=1e-5
        )
    assert wandb.run is None
    go(reader(), tmp_path / "none.jsonl", 0, 1)  # no run is active
