"""`Monitor`: every so many training steps, what the attention heads do, as layer quantiles; events with their step."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._validate import describe, is_integer
from .events import Event, Heads, Limits, Watch
from .journal import Journal
from .listening import Real, listener
from .result import Layer

log = logging.getLogger("regard.monitor")

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
NAMED = {"normalized_entropy": "entropy_norm", "max_scores": "max_score"}  # as people's dashboards call them
LOWEST = ("entropy", "entropy_norm")  # where the lowest head is the one to look at; else the highest
ALIAS = "max_attention_logit"  # Megatron's name of the largest score of all
DIGITS = 7


class Monitor:
    """Watches the attention of a model in training, every `every` steps.

    The model is one of transformers, or any module whose submodules call `regard.attention`. Use it around the forward
    and backward passes of a step, with as many micro-batches as the step has, and tell it the loss afterwards:

        monitor = regard.Monitor(model, every=50, path="run.jsonl")
        for step, batch in enumerate(batches):
            with monitor(step):
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            monitor.log(loss)

    In between the model is exactly the stock model. A sampled step gives, for each layer, the 10, 50 and 90 % quantiles
    over heads of each statistic's mean over rows (padding and rows without keys are not counted), the lowest entropy,
    else the highest mean, and the largest score: `attn/entropy_norm/L03_p10`, `attn/max_score/L03`,
    `max_attention_logit`. They go to a JSON-lines file (`path`; a folder gets `attention.jsonl`), to `writer` (a
    TensorBoard SummaryWriter, or a folder for one) and to `wandb` (a run; None: the one that is active, False: none).

    Events (a largest score above 100, a 6σ spike, a collapse dip, a loss that is not finite) go there, too, and to the
    logger "regard.monitor"; `thresholds` (a `Limits`, or a dict of some of its fields) moves their lines.
    `statistics` are names of `AuxRequest`'s fields beside entropy and max_scores. Passes without gradients are counted
    with `evaluation` only. `real` tells which tokens are not padding ([B, T]) from the model's arguments by name; by
    default it is a 2-D `attention_mask`. With several processes every one samples the same steps; one all-reduce joins
    what they saw (over `process_group`, the data-parallel one if there are others), and the first one writes. Some may
    see nothing of a layer, or of any; where one sees a layer that is new they exchange what they know first.
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
        if isinstance(thresholds, Mapping):
            unknown = thresholds.keys() - {field.name for field in fields(Limits)}
            if unknown:
                known = ", ".join(field.name for field in fields(Limits))
                raise ValueError(f"thresholds: expected names among {known}, got {', '.join(map(repr, unknown))}")
            thresholds = Limits(**thresholds)  # type: ignore[arg-type]
        if thresholds is not None and not isinstance(thresholds, Limits):
            raise TypeError(f"thresholds: expected a Limits, a dict or None, got {describe(thresholds)}")
        self.model = _unwrapped(model)
        self.every, self.group = int(every), process_group
        self.listener = listener(self.model, statistics, evaluation, real)
        self.watch = Watch(thresholds or Limits())
        self.current = -1  # the step under way, or the last one
        self.layout: dict[int, tuple[str, int, tuple[str, ...]]] = {}  # layer: its name, heads and channels
        self._agreed: dict[int, tuple[str, int, tuple[str, ...]]] = {}  # ... as every process knows them
        self._listening: contextlib.ExitStack | None = None
        self._pending: dict[str, Any] | None = None  # a sampled step whose loss is not known yet
        self._told: dict[str, Any] = {}  # what `log` said last, by step
        self._waiting: list[tuple[int, Any, Any]] = []  # ... and what is still on an accelerator
        self._since: list[float] = []  # lowest and highest loss since the last line
        self._silent = False
        self.journal = Journal(path, self._about()) if self._first() else None
        self.writer, self._own_writer = _writer(writer) if self._first() else (None, False)
        self._wandb, self._wandb_row = wandb, None

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def __call__(self, step: int | None = None) -> Iterator[Monitor]:
        """Around the passes of a step (None: the one after the last): listens where the step is due."""
        self.start(step)
        try:
            yield self
        except BaseException:
            self._abandon()
            raise
        self.stop()

    def due(self, step: int) -> bool:
        """Whether this step is sampled."""
        return step % self.every == 0

    def start(self, step: int | None = None, sample: bool | None = None) -> None:
        """What `with monitor(step)` does at its beginning; `sample` decides whether it is sampled (None: if due)."""
        step = self.current + 1 if step is None else step
        if not is_integer(step) or step < 0:
            raise ValueError(f"step: expected an int >= 0 or None, got {describe(step)}")
        self._abandon()
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
        if self._listening is None:
            return
        self._abandon()
        layers = self._joined(self.listener.layers)
        self.listener.clear()
        if not any(float(layer.rows.sum()) for layer in layers):
            if not self._silent:
                warnings.warn(
                    f"Monitor: no attention of {type(self.model).__name__} was seen in step {self.current}; expected "
                    f"a transformers model, or modules that call regard.attention, in a pass with gradients",
                    stacklevel=3,
                )
            self._silent = True
            return
        self._pending = {"step": self.current, "layers": layers}
        if self._told.get("step") == self.current:
            self.flush()

    def log(self, loss: Any = None, grad_norm: Any = None, *, step: int | None = None) -> None:
        """The loss and gradient norm of a step (None: the last one): numbers or tensors of one element.

        With several processes the first one's are written; give what you would log. Tensors on an accelerator are not
        waited for before the next sampled step.
        """
        step = self.current if step is None else step
        given = [x.detach() if isinstance(x, Tensor) else x for x in (loss, grad_norm)]
        self._waiting.append((step, given[0], given[1]))
        sampled = self._pending is not None and self._pending["step"] == step
        if (
            sampled
            or len(self._waiting) > 1000
            or not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in given)
        ):
            self._drain()
        if sampled:
            self.flush()

    def _drain(self) -> None:
        """Look at the losses that came."""
        waiting, self._waiting = self._waiting, []
        for step, *given in waiting:
            loss, norm = (None if x is None else float(x) for x in given)
            self._told = {"step": step, "loss": loss, "grad_norm": norm}
            if loss is not None and math.isfinite(loss):
                self._since = [min([*self._since, loss]), max([*self._since, loss])]
            self._tell(self.watch.logged(step, loss=loss, grad_norm=norm))

    def flush(self) -> None:
        """Write what is known: losses on their way, and a sampled step that waits for its loss."""
        self._drain()
        if self._pending is None:
            return
        step, layers = self._pending["step"], self._pending["layers"]
        self._pending = None
        self.layout |= {layer.index: _laid_out(layer) for layer in layers}
        metrics = _metrics(layers)
        told = self._told if self._told.get("step") == step else {}
        line: dict[str, Any] = {"step": step}
        line |= {name: _number(told[name]) for name in ("loss", "grad_norm") if told.get(name) is not None}
        if self._since:
            line |= {"loss_min": _number(self._since[0]), "loss_max": _number(self._since[1])}
        self._since = []
        line["rows"] = int(max(float(layer.rows.max()) for layer in layers))
        line |= {name: _number(value) for name, value in metrics.items()}
        events = self.watch.sampled(step, [_heads(layer) for layer in layers])
        if self.journal is not None:
            named = [[layer.index, layer.name, layer.heads] for layer in layers]
            if named != self.journal.layers:
                self.journal.write({"layers": named})
            self.journal.write(line)
            self._send(step, {name: value for name, value in metrics.items() if math.isfinite(value)})
        self._tell(events)

    def close(self) -> None:
        """Write what is known and let go of the model."""
        self._abandon()
        self.flush()
        if self._own_writer and self.writer is not None:
            self.writer.close()

    def _abandon(self) -> None:
        """Listen no more; what was heard is not kept."""
        if self._listening is not None:
            listening, self._listening = self._listening, None
            listening.close()

    # --- with checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that later events depend on, as plain numbers, lists and strings."""
        self.flush()
        layers = [[index, name, heads, list(channels)] for index, (name, heads, channels) in self.layout.items()]
        return {"version": 1, "step": self.current, "since": list(self._since), "layers": layers} | {
            "watch": self.watch.state_dict()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state_dict` was called; what the run file has of later ones is put aside."""
        if not isinstance(state, dict) or state.get("version") != 1:
            raise ValueError("state: expected what Monitor.state_dict() gives (version 1), got something else")
        self._abandon()
        self._pending, self._waiting, self._told, self._agreed = None, [], {}, {}
        self.watch.load_state_dict(state["watch"])
        self.current, self._since = int(state["step"]), list(state["since"])
        self.layout = {index: (name, heads, tuple(channels)) for index, name, heads, channels in state["layers"]}
        if self.journal is not None and self.current < self.journal.last:
            self.journal.rewind(self.current + 1)

    # --- several processes --------------------------------------------------------------------------------------------

    def _world(self) -> tuple[int, int]:
        """This process's number and how many there are."""
        if not dist.is_available() or not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def _first(self) -> bool:
        """Whether this process writes; before the processes know one another, torchrun has numbered them."""
        if dist.is_available() and dist.is_initialized():
            return self._world()[0] == 0
        return os.environ.get("RANK", "0") == "0"

    def _joined(self, layers: list[Layer]) -> list[Layer]:
        """What all processes saw: one all-reduce over sums and counts, and a slot for each process's maxima.

        Its size follows from the layers that all have agreed on; one that saw none of a layer brings zeros. Where a
        process saw others (each does in the first sampled step that shows any) they agree on more, and sum again.
        """
        layers = [_flat(layer) for layer in layers]
        if self._world()[1] == 1:
            return layers
        if not self._agreed:
            self._agree(layers)
        while True:
            if not self._agreed:
                return []
            news = any(self._agreed.get(layer.index) != _laid_out(layer) for layer in layers)
            joined, told = self._summed(layers, news)
            if not told:
                return joined
            self._agree(layers)

    def _agree(self, layers: list[Layer]) -> None:
        """On the layers that any process has seen."""
        rank, world = self._world()
        mine = self.layout | {layer.index: _laid_out(layer) for layer in layers}
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, mine, group=self.group)
        agreed: dict[int, tuple[str, int, tuple[str, ...]]] = {}
        for other, theirs in enumerate(everybody):
            for index, layout in theirs.items():
                if agreed.setdefault(index, layout) != layout:  # the same everywhere: nobody is left waiting
                    raise RuntimeError(
                        f"Monitor: expected every process to see the same layers, but layer {index} is "
                        f"{agreed[index]} in one and {layout} in process {other}; this is process {rank}"
                    )
        self._agreed = dict(sorted(agreed.items()))

    def _summed(self, layers: list[Layer], news: bool) -> tuple[list[Layer], bool]:
        """The agreed layers over all processes, and whether any has news: layers that are not among them."""
        rank, world = self._world()
        seen = {layer.index: layer for layer in layers}
        joined = []
        for index, (name, heads, channels) in self._agreed.items():
            known = index in seen and _laid_out(seen[index]) == (name, heads, channels)
            joined.append(seen[index].copy() if known else _flat(Layer.empty(name, index, heads, channels)))
        sums = [torch.tensor([float(news)], dtype=torch.float64)]
        sums += [part.flatten() for layer in joined for part in (layer.sums, layer.counts, layer.rows)]
        maxima = torch.cat([layer.maxima.flatten() for layer in joined])
        slots = torch.zeros(world, len(maxima), dtype=torch.float64)
        slots[rank] = maxima
        packed = torch.cat([*sums, slots.flatten()]).to(self._device())
        dist.all_reduce(packed, group=self.group)
        packed = packed.cpu()
        maxima = packed[len(packed) - slots.numel() :].view(world, -1).amax(0)
        at, at_max = 1, 0
        for layer in joined:
            for part in ("sums", "counts", "rows"):
                old = getattr(layer, part)
                setattr(layer, part, packed[at : at + old.numel()].view_as(old))
                at += old.numel()
            size = layer.maxima.numel()
            layer.maxima = maxima[at_max : at_max + size].view_as(layer.maxima)
            at_max += size
        return joined, bool(packed[0])

    def _device(self) -> torch.device:
        """Where the group's tensors live."""
        if "nccl" not in str(dist.get_backend(self.group)):
            return torch.device("cpu")
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    # --- where it goes ------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        from .. import __version__

        config = getattr(self.model, "config", None)
        return {
            "model": type(self.model).__name__,
            "checkpoint": str(getattr(config, "_name_or_path", "") or ""),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "every": self.every,
            "processes": self._world()[1],
            "regard": __version__,
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _tell(self, events: list[Event]) -> None:
        """Events, to everybody."""
        if self.journal is None:
            return
        for event in events:
            shown = {name: _number(x) if isinstance(x, float) else x for name, x in event.to_dict().items()}
            self.journal.write({"step": event.step, "event": shown.pop("rule")} | shown)
            log.warning("step %d: %s: %s", event.step, event.rule, event.message)
            value = math.nan if event.value is None else event.value
            self._send(event.step, {f"attn/event/{event.rule}": value}, f"{event.rule}: {event.message}")

    def _send(self, step: int, metrics: dict[str, float], text: str | None = None) -> None:
        """Scalars to the trackers."""
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            if text is not None:
                self.writer.add_text("attn/events", text, step)
            self.writer.flush()
        run = self._run()
        if run is not None:
            if self._wandb_row is None:
                run.define_metric("attn/step", hidden=True)
                for pattern in ("attn/*", ALIAS):
                    run.define_metric(pattern, step_metric="attn/step")
            # Into the row that the user's next `log` ends: a row of our own would move the step under his feet. Only
            # where he has ended none since our last, ours must be ended first, or it would be written over.
            elif self._wandb_row == run.step:
                run.log({}, commit=True)
            run.log({"attn/step": step} | metrics, commit=False)
            self._wandb_row = run.step

    def _run(self) -> Any:
        if self._wandb is not None:
            return None if self._wandb is False else self._wandb
        return getattr(sys.modules.get("wandb"), "run", None)


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile: that one is called with its own arguments."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in _WRAPPERS:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _writer(writer: Any) -> tuple[Any, bool]:
    """A SummaryWriter, and whether it is ours to close."""
    if isinstance(writer, str | PathLike):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"writer: a folder needs tensorboard: pip install tensorboard ({error})") from None
        return SummaryWriter(str(writer)), True
    if writer is not None and not (hasattr(writer, "add_scalar") and hasattr(writer, "add_text")):
        raise TypeError(f"writer: expected a SummaryWriter, a folder or None, got {describe(writer)}")
    return writer, False


# --- from sums to numbers ---------------------------------------------------------------------------------------------


def _laid_out(layer: Layer) -> tuple[str, int, tuple[str, ...]]:
    return layer.name, layer.heads, layer.channels


def _flat(layer: Layer) -> Layer:
    """Over all positions: one bin."""
    flat = layer.copy()
    flat.sums, flat.counts, flat.rows = layer.sums.sum(0), layer.counts.sum(0), layer.rows.sum(0)
    return flat


def _channel(layer: Layer, name: str) -> Tensor:
    """[H]: the mean over rows (of `max_scores`: the maximum); NaN for a head without rows."""
    n = layer.channels.index(name)
    if name == "max_scores":
        return torch.where(layer.counts[n] > 0, layer.maxima[n], math.nan)
    return layer.sums[n] / layer.counts[n]


def _metrics(layers: list[Layer]) -> dict[str, float]:
    """Each layer's quantiles over heads, under their names."""
    digits = max(2, len(str(max(layer.index for layer in layers))))
    found: dict[str, float] = {}
    for channel in layers[0].channels:
        if channel == "log_keys":
            continue
        name = NAMED.get(channel, channel)
        for layer in layers:
            label = f"attn/{name}/L{layer.index:0{digits}d}"
            values = _channel(layer, channel)
            values = values[~values.isnan()]
            if not len(values):
                continue
            if channel == "max_scores":
                found[label] = float(values.max())
                continue
            for quantile, share in QUANTILES.items():
                found[f"{label}_{quantile}"] = float(values.quantile(share))
            if name in LOWEST:
                found[f"{label}_min"] = float(values.min())
            else:
                found[f"{label}_max"] = float(values.max())
    scores = [value for name, value in found.items() if name.startswith("attn/max_score/")]
    if scores:
        found[ALIAS] = max(scores)
    return found


def _heads(layer: Layer) -> Heads:
    entropy = _channel(layer, "normalized_entropy")
    known = entropy[~entropy.isnan()]
    lower = float(known.quantile(QUANTILES["p10"])) if len(known) else math.nan
    return Heads(layer.index, entropy.tolist(), lower, _channel(layer, "max_scores").tolist())


def _number(value: float) -> float | None:
    """As a JSON number, with the digits that matter."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
