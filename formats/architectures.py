"""What is known of each architecture, as data: names in the checkpoint, what engines fuse, which norm feeds which
linears.

The planner reads it to decide what is quantised and to refuse mixtures that engines cannot load; the transforms read it
to know where a scale can be folded. An unknown architecture still works: its linears are found by name and shape, and
nothing is folded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal


@dataclass(frozen=True)
class Feed:
    """A producer whose output channels are exactly the input channels of `targets`, so that a scale can move across.

    Names are relative to the block; `*` stands for an expert number, the same one on both sides. `part` names the rows
    of a fused producer that count ("v" of a qkv projection, "up" of a gate-and-up projection). `also` are consumers of
    the same input that stay unquantised (a router) but must be rescaled with it.
    """

    kind: Literal["norm", "linear"]
    source: str
    targets: tuple[str, ...]
    part: Literal["all", "v", "up"] = "all"
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """Facts of one architecture. Names of linears are relative to a block, patterns may hold `*` for experts."""

    name: str
    linears: tuple[str, ...]
    fused: tuple[tuple[str, ...], ...]
    feeds: tuple[Feed, ...] = ()
    norm_offset: float = 0.0
    layers: str = "model.layers"
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    experts: bool = False
    known: bool = True
    block_pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern = re.compile(re.escape(self.layers) + r"\.(\d+)\.(.+)$")
        object.__setattr__(self, "block_pattern", pattern)

    def split(self, tensor: str) -> tuple[int, str] | None:
        """(block number, name inside the block) of a checkpoint name, None for what lies outside the blocks."""
        match = self.block_pattern.match(tensor)
        return (int(match[1]), match[2]) if match else None

    def count_blocks(self, tensors: Iterable[str]) -> int:
        """How many blocks have tensors among these checkpoint names."""
        return len({place[0] for name in tensors if (place := self.split(name)) is not None})

    def is_linear(self, tensor: str, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint tensor is the weight of a linear inside a block that may be quantised."""
        place = self.split(tensor)
        if place is None or len(shape) != 2 or not tensor.endswith(".weight"):
            return False
        inner = place[1].removesuffix(".weight")
        return any(fnmatchcase(inner, pattern) for pattern in self.linears)

    def fused_with(self, inner: str) -> tuple[str, ...]:
        """The linears that engines fuse with `inner` (itself included), relative names with the same expert number."""
        for group in self.fused:
            for pattern in group:
                expert = _expert(pattern, inner)
                if expert is not None:
                    return tuple(name.replace("*", expert) for name in group)
        return (inner,)

    def fused_names(self, linear: str) -> tuple[str, ...]:
        """`fused_with` by whole checkpoint names."""
        place = self.split(linear)
        if place is None:
            return (linear,)
        stem = linear.removesuffix(place[1])
        return tuple(stem + inner for inner in self.fused_with(place[1]))


def _expert(pattern: str, name: str) -> str | None:
    """What `*` stands for where `name` matches `pattern` ("" without a star), else None."""
    head, star, tail = pattern.partition("*")
    if not star:
        return "" if name == pattern else None
    middle = name[len(head) : len(name) - len(tail)]
    fits = name.startswith(head) and name.endswith(tail) and middle.isdecimal()
    return middle if fits else None


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DENSE = (*_QKV, "self_attn.o_proj", *_GATE_UP, "mlp.down_proj")
_ATTENTION_FEEDS = (
    Feed("norm", "input_layernorm", _QKV),
    Feed("linear", "self_attn.v_proj", ("self_attn.o_proj",)),
)
_UP_DOWN = Feed("linear", "mlp.up_proj", ("mlp.down_proj",))
_LLAMA_FEEDS = (*_ATTENTION_FEEDS, Feed("norm", "post_attention_layernorm", _GATE_UP), _UP_DOWN)
_GEMMA_FEEDS = (*_ATTENTION_FEEDS, Feed("norm", "pre_feedforward_layernorm", _GATE_UP), _UP_DOWN)


def _dense(name: str) -> Architecture:
    return Architecture(name, _DENSE, (_QKV, _GATE_UP), _LLAMA_FEEDS)


def _gemma(name: str) -> Architecture:
    return Architecture(name, _DENSE, (_QKV, _GATE_UP), _GEMMA_FEEDS, norm_offset=1.0)


def _experts(name: str, block: str, gate: str, up: str, down: str) -> Architecture:
    gate_up = tuple(f"{block}.experts.*.{part}" for part in (gate, up))
    down_name = f"{block}.experts.*.{down}"
    feeds = (
        *_ATTENTION_FEEDS,
        Feed("norm", "post_attention_layernorm", gate_up, also=(f"{block}.gate",)),
        Feed("linear", gate_up[1], (down_name,)),
    )
    linears = (*_QKV, "self_attn.o_proj", *gate_up, down_name)
    return Architecture(name, linears, (_QKV, gate_up), feeds, experts=True)


def _phi3() -> Architecture:
    linears = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    feeds = (
        Feed("norm", "input_layernorm", (linears[0],)),
        Feed("linear", linears[0], (linears[1],), part="v"),
        Feed("norm", "post_attention_layernorm", (linears[2],)),
        Feed("linear", linears[2], (linears[3],), part="up"),
    )
    return Architecture("phi3", linears, (), feeds)


ARCHITECTURES: dict[str, Architecture] = {
    row.name: row
    for row in (
        _dense("llama"),
        _dense("mistral"),
        _dense("qwen2"),
        _dense("qwen3"),
        _gemma("gemma2"),
        _gemma("gemma3_text"),
        _phi3(),
        _experts("mixtral", "block_sparse_moe", "w1", "w3", "w2"),
        _experts("qwen3_moe", "mlp", "gate_proj", "up_proj", "down_proj"),
    )
}
_NUMBERED = re.compile(r"^(.*?\.?(?:layers|blocks|h))\.\d+\.")
_NOT_LINEAR = re.compile(r"norm|embed|router|(^|\.)gate\.weight$|conv", re.IGNORECASE)


def architecture(config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    """The facts for a checkpoint: the table's row for its `model_type`, else what its names and shapes tell."""
    known = ARCHITECTURES.get(str(config.get("model_type")))
    return known or _unknown(str(config.get("model_type")), shapes)


def _unknown(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    layers = "model.layers"
    for tensor in sorted(shapes):
        match = _NUMBERED.match(tensor)
        if match:
            layers = match[1]
            break
    bare = Architecture(name, (), (), layers=layers, known=False)
    linears = sorted(set(_inner_linears(bare, shapes)))
    groups = [group for group in (_QKV, _GATE_UP) if set(group) <= set(linears)]
    return Architecture(name, tuple(linears), tuple(groups), layers=layers, known=False)


def _inner_linears(bare: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    for tensor, shape in shapes.items():
        place = bare.split(tensor)
        if place and len(shape) == 2 and place[1].endswith(".weight") and not _NOT_LINEAR.search(place[1]):
            yield place[1].removesuffix(".weight")
