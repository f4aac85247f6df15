"""`Trackers`: sends the metrics of a monitor to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import sys
from os import PathLike
from typing import Any

from .._validate import describe
from .metrics import ALIAS


class Trackers:
    """`writer`: a SummaryWriter, a folder for one, or None. `wandb`: a run; None: the active one; False: none."""

    def __init__(self, writer: Any, wandb: Any) -> None:
        self.writer, self._owns_writer = _writer(writer)
        self._wandb, self._wandb_step = wandb, None  # ... and the W&B step of our last row

    def send(self, step: int, metrics: dict[str, float], text: str | None = None) -> None:
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            if text is not None:
                self.writer.add_text("attn/events", text, step)
            self.writer.flush()
        run = self._wandb_run()
        if run is not None:
            if self._wandb_step is None:
                run.define_metric("attn/step", hidden=True)
                for pattern in ("attn/*", ALIAS):
                    run.define_metric(pattern, step_metric="attn/step")
            # Our values go into the row that the user's next `log` completes: a row of our own would advance W&B's
            # step. If the user has completed none since our last values, we complete it, or they would be overwritten.
            elif self._wandb_step == run.step:
                run.log({}, commit=True)
            run.log({"attn/step": step} | metrics, commit=False)
            self._wandb_step = run.step

    def close(self) -> None:
        if self._owns_writer and self.writer is not None:
            self.writer.close()

    def _wandb_run(self) -> Any:
        if self._wandb is not None:
            return None if self._wandb is False else self._wandb
        return getattr(sys.modules.get("wandb"), "run", None)


def _writer(writer: Any) -> tuple[Any, bool]:
    """A SummaryWriter, and whether we created it and must close it."""
    if isinstance(writer, str | PathLike):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"writer: a folder needs tensorboard: pip install tensorboard ({error})") from None
        return SummaryWriter(str(writer)), True
    if writer is not None and not (hasattr(writer, "add_scalar") and hasattr(writer, "add_text")):
        raise TypeError(f"writer: expected a SummaryWriter, a folder or None, got {describe(writer)}")
    return writer, False
