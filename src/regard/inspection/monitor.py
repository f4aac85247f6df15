"""`Monitor`: in every so many training steps, metrics of the attention heads as quantiles by layer, and events."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

from torch import Tensor, nn

from .._compat import uncompiled
from .._validate import describe, is_integer
from . import provenance
from .events import Event, EventDetector, Limits
from .journal import Journal
from .layers import Layer
from .listeners import Real, listener
from .metrics import Layout, heads_of, layout_of, metrics_of
from .numbers import json_number
from .processes import ProcessGroup
from .trackers import Trackers

log = logging.getLogger("regard.monitor")

DIGITS = 7  # of the numbers in the run file


class Monitor:
    """Records the attention of a model in training, every `every` steps.

    The model is one of transformers, or any module whose submodules call `regard.attention` or PyTorch's
    `scaled_dot_product_attention` (as `nn.TransformerEncoder` does). Use it around the forward and backward passes of a
    step, with as many micro-batches as the step has, and pass it the loss afterwards:

        monitor = regard.Monitor(model, every=50, path="run.jsonl")
        for step, batch in enumerate(batches):
            with monitor(step):
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            monitor.log(loss)

    Between sampled steps the model is exactly the stock model. A sampled step gives, for each layer, the 10, 50 and
    90 % quantiles over heads of each statistic's mean over rows (padding and rows without keys are not counted), the
    lowest mean for the entropies and the highest for the others, and the largest score: `attn/entropy_norm/L03_p10`,
    `attn/max_score/L03`, `max_attention_logit`. They go to a JSON-lines file (`path`; a folder gets `attention.jsonl`),
    to `writer` (a TensorBoard SummaryWriter, or a folder for one) and to `wandb` (a run; None: the active one, False:
    none).

    Events (a largest score above 100, a 6σ spike, a collapse dip, a loss that is not finite) go to the same places, and
    to the logger "regard.monitor"; `thresholds` (a `Limits`, or a dict of some of its fields) changes their thresholds.
    `statistics` are names of `AuxRequest`'s fields, in addition to entropy and max_scores. Passes without gradients
    count only with `evaluation`. `real` is a function from the model's arguments by name to the mask [B, T] of tokens
    that are not padding; by default it is a 2-D `attention_mask`.

    With several processes each one samples the same steps. One all-reduce joins their sums (over `process_group`, which
    is the data-parallel one if there are others), and the first process writes. A process may see no call of a layer,
    or of any; when a process sees a new layer, the processes first exchange the layers that they know.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        path: str | PathLike[str] = "attention.jsonl",
        statistics: Iterable[str] | None = None,
        thresholds: Limits | Mapping[str, float] | None = None,
        writer: Any = None,
        wandb: Any = None,
        evaluation: bool = False,
        real: Real | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {describe(model)}")
        if not is_integer(every) or every < 1:
            raise ValueError(f"every: expected a positive int, got {describe(every)}")
        self.model = _unwrapped(model)
        self.every = int(every)
        self.detector = EventDetector(_checked_limits(thresholds))
        self.listener = listener(self.model, statistics, evaluation, real)
        self.processes = ProcessGroup(self.model, process_group)
        self.current = -1  # the step under way, or the last one
        self.layout: dict[int, Layout] = {}  # of the layers of all sampled steps, by number
        self._listening: contextlib.ExitStack | None = None  # entered in a sampled step
        self._pending: tuple[int, list[Layer]] | None = None  # a sampled step whose loss is not known yet
        self._logged: dict[str, Any] = {}  # the step, loss and gradient norm of the last `log`
        self._waiting: list[tuple[int, Any, Any]] = []  # logged values that are still on an accelerator
        self._loss_range: list[float] = []  # lowest and highest loss since the last line
        self._warned = False
        self.journal: Journal | None = None
        self.trackers: Trackers | None = None
        if self.processes.is_first():
            about = provenance.of_run(self.model) | {"declared": self.listener.problems_as_json()}
            self.journal = Journal(path, about | {"every": self.every, "processes": self.processes.rank_and_size()[1]})
            self.trackers = Trackers(writer, wandb)

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def __call__(self, step: int | None = None) -> Iterator[Monitor]:
        """Around the passes of a step (None: the one after the last). Records them if the step is due."""
        self.start(step)
        try:
            yield self
        except BaseException:
            self._stop_listening()
            raise
        self._finish(4)  # _finish, this function, contextlib, the caller

    def due(self, step: int) -> bool:
        """Whether this step is sampled."""
        return step % self.every == 0

    def start(self, step: int | None = None, sample: bool | None = None) -> None:
        """What `with monitor(step)` does at its beginning. `sample`: whether to sample the step (None: if due)."""
        step = self.current + 1 if step is None else step
        if not is_integer(step) or step < 0:
            raise ValueError(f"step: expected an int >= 0 or None, got {describe(step)}")
        self._stop_listening()
        self.flush()
        self.current = int(step)
        if self.journal is not None and self.current <= self.journal.last:
            self.journal.rewind(self.current)
        if self.due(self.current) if sample is None else sample:
            self.listener.clear()
            self._listening = contextlib.ExitStack()
            self._listening.enter_context(self.listener.listening())

    def stop(self) -> None:
        """What `with monitor(step)` does at its end."""
        self._finish(3)

    def _finish(self, level: int) -> None:
        """End a sampled step. `level`: the stack level of the caller, for a warning."""
        if self._listening is None:
            return
        self._stop_listening()
        layers = self.processes.summed(self.listener.layers, self.layout)
        self.listener.clear()
        if not any(float(layer.rows.sum()) for layer in layers):
            if not self._warned:
                warnings.warn(
                    f"Monitor: no attention of {type(self.model).__name__} was seen in step {self.current}; expected "
                    f"a transformers model, or modules that call regard.attention or PyTorch's "
                    f"scaled_dot_product_attention (nn.MultiheadAttention does with need_weights=False), in a pass "
                    f"with gradients (evaluation=True: any pass)",
                    stacklevel=level,
                )
            self._warned = True
            return
        self._pending = self.current, layers
        if self._logged.get("step") == self.current:
            self.flush()

    def log(self, loss: Any = None, grad_norm: Any = None, *, step: int | None = None) -> None:
        """The loss and gradient norm of a step (None: the last one): numbers or tensors of one element.

        With several processes those of the first one are written; pass what you would log. Tensors on an accelerator
        are read at the next sampled step, so that the training does not wait for them.
        """
        step = self.current if step is None else step
        given = [x.detach() if isinstance(x, Tensor) else x for x in (loss, grad_norm)]
        self._waiting.append((step, given[0], given[1]))
        sampled = self._pending is not None and self._pending[0] == step
        on_accelerator = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in given)
        if sampled or len(self._waiting) > 1000 or not on_accelerator:
            self._read_waiting()
        if sampled:
            self.flush()

    def _read_waiting(self) -> None:
        """Read the logged values and apply the rules to them."""
        waiting, self._waiting = self._waiting, []
        for step, *given in waiting:
            loss, norm = (None if x is None else float(x) for x in given)
            self._logged = {"step": step, "loss": loss, "grad_norm": norm}
            if loss is not None and math.isfinite(loss):
                self._loss_range = [min([*self._loss_range, loss]), max([*self._loss_range, loss])]
            self._report(self.detector.logged(step, loss=loss, grad_norm=norm))

    def flush(self) -> None:
        """Write what is known: logged values, and a sampled step that waits for its loss."""
        self._read_waiting()
        if self._pending is None:
            return
        (step, layers), self._pending = self._pending, None
        self.layout |= {layer.index: layout_of(layer) for layer in layers}
        metrics = metrics_of(layers)
        logged = self._logged if self._logged.get("step") == step else {}
        line: dict[str, Any] = {"step": step}
        line |= {name: _number(logged[name]) for name in ("loss", "grad_norm") if logged.get(name) is not None}
        if self._loss_range:
            line |= {"loss_min": _number(self._loss_range[0]), "loss_max": _number(self._loss_range[1])}
        self._loss_range = []
        line["rows"] = int(max(float(layer.rows.max()) for layer in layers))
        line |= {name: _number(value) for name, value in metrics.items()}
        events = self.detector.sampled(step, [heads_of(layer) for layer in layers])
        if self.journal is not None and self.trackers is not None:
            named = [[layer.index, layer.name, layer.heads] for layer in layers]
            if named != self.journal.layers:
                self.journal.write({"layers": named})
            self.journal.write(line)
            self.trackers.send(step, {name: value for name, value in metrics.items() if math.isfinite(value)})
        self._report(events)

    def _report(self, events: list[Event]) -> None:
        """Events to the run file, the logger and the trackers."""
        if self.journal is None or self.trackers is None:
            return
        for event in events:
            shown = {name: _number(x) if isinstance(x, float) else x for name, x in event.to_dict().items()}
            self.journal.write({"step": event.step, "event": shown.pop("rule")} | shown)
            log.warning("%s", event)
            value = math.nan if event.value is None else event.value
            text = f"{event.rule}: {event.message}. Remedy: {event.remedy}"
            self.trackers.send(event.step, {f"attn/event/{event.rule}": value}, text)

    def close(self) -> None:
        """Write what is known and stop listening to the model."""
        self._stop_listening()
        self.flush()
        if self.trackers is not None:
            self.trackers.close()

    def _stop_listening(self) -> None:
        if self._listening is not None:
            listening, self._listening = self._listening, None
            listening.close()

    # --- with checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything on which later events depend, as plain numbers, lists and strings."""
        self.flush()
        layers = [[index, name, heads, list(channels)] for index, (name, heads, channels) in self.layout.items()]
        return {"version": 1, "step": self.current, "since": list(self._loss_range), "layers": layers} | {
            "watch": self.detector.state_dict()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which `state_dict` was called. Later lines of the run file are moved aside."""
        if not isinstance(state, dict) or state.get("version") != 1:
            raise ValueError("state: expected what Monitor.state_dict() gives (version 1), got something else")
        self._stop_listening()
        self._pending, self._waiting, self._logged = None, [], {}
        self.processes.forget()
        self.detector.load_state_dict(state["watch"])
        self.current, self._loss_range = int(state["step"]), list(state["since"])
        self.layout = {index: (name, heads, tuple(channels)) for index, name, heads, channels in state["layers"]}
        if self.journal is not None and self.current < self.journal.last:
            self.journal.rewind(self.current + 1)


def _checked_limits(thresholds: Limits | Mapping[str, float] | None) -> Limits:
    if isinstance(thresholds, Mapping):
        known = [field.name for field in fields(Limits)]
        unknown = thresholds.keys() - set(known)
        if unknown:
            raise ValueError(
                f"thresholds: expected names among {', '.join(known)}, got {', '.join(map(repr, unknown))}"
            )
        return Limits(**thresholds)  # type: ignore[arg-type]
    if thresholds is not None and not isinstance(thresholds, Limits):
        raise TypeError(f"thresholds: expected a Limits, a dict or None, got {describe(thresholds)}")
    return thresholds or Limits()


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile: its forward has the arguments by name."""
    while True:
        inner = uncompiled(model)
        if inner is None and type(model).__name__ in _WRAPPERS:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _number(value: float) -> float | None:
    return json_number(value, DIGITS)
