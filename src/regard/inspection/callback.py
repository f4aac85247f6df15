"""`MonitorCallback`: a `Monitor` that transformers' Trainer calls. Its public name is `regard.hf.MonitorCallback`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from .events import Limits
from .journal import NAME
from .monitor import Monitor


class MonitorCallback(TrainerCallback, ExportableState):
    """`Trainer(callbacks=[MonitorCallback(every=50)])`: a `Monitor` of the model that is trained.

    Steps have the Trainer's numbers: the first step and every `every`-th are sampled. Loss and gradient norm are those
    that the Trainer logs, so events see them every `logging_steps` steps (1 is best). The run file is `attention.jsonl`
    in the Trainer's output folder, or `path`. The metrics also go to TensorBoard and W&B if the Trainer reports to
    them, or to `writer` and `wandb`. The monitor's state is saved with checkpoints, and
    `trainer.train(resume_from_checkpoint=...)` continues as if the run had not been interrupted. Other arguments are
    those of `Monitor`.
    """

    def __init__(self, *, every: int = 50, path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.every, self.path, self.options = every, path, options
        self.monitor: Monitor | None = None
        self.saved: dict[str, Any] | None = None  # the monitor's state, from a checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._close()  # the monitor of an interrupted run
        options = dict(self.options)
        reported = args.report_to or []
        if state.is_world_process_zero and "tensorboard" in reported:
            folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or os.path.join(args.output_dir, "runs", "attention")
            options.setdefault("writer", os.path.expanduser(folder))
        if "wandb" not in reported:
            options.setdefault("wandb", False)
        path = Path(args.output_dir) / NAME if self.path is None else self.path
        self.monitor = Monitor(given["model"], every=self.every, path=path, **options)
        stored = state.stateful_callbacks.setdefault(type(self).__name__, {})
        saved = self.saved or (stored.get("attributes", {}) if isinstance(stored, dict) else {}).get("saved")
        if saved is not None and state.global_step:
            self.monitor.load_state_dict(saved)
        self.saved = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.monitor is not None
        step = state.global_step + 1  # the number that the Trainer gives it when it is complete
        self.monitor.start(step, sample=step == 1 or self.monitor.due(step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.monitor is not None
        self.monitor.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.monitor is not None and logs is not None and "loss" in logs:
            self.monitor.log(float(logs["loss"]), logs.get("grad_norm"), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.saved = None
            self.monitor.close()
            self.monitor = None

    def state(self) -> dict[str, Any]:
        """What the Trainer saves with a checkpoint."""
        path = None if self.path is None else str(self.path)
        plain = {
            name: self.options[name] for name in ("statistics", "evaluation", "thresholds") if name in self.options
        }
        if isinstance(plain.get("thresholds"), Limits):
            plain["thresholds"] = asdict(plain["thresholds"])
        saved = None if self.monitor is None else self.monitor.state_dict()
        return {"args": {"every": self.every, "path": path} | plain, "attributes": {"saved": saved}}
