"""Joins the facts of an architecture to the tensors of one block: which producer a scale can move into, and who reads
it.

The weights are float32 masters keyed by checkpoint name; transforms edit them in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...calibration.lanes import Stage
from ...calibration.statistics import Stats
from ...formats.architectures import Architecture, Feed
from ...formats.scheme import Scheme
from ...quantizers.method import LiveFeed, Source, Target


@dataclass(frozen=True)
class Heads:
    """Attention head counts of a config, for grouped-query folds and fused projections."""

    query: int
    key_value: int
    size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads:
        """Read them from a config.json dictionary."""
        query = int(config["num_attention_heads"])
        key_value = int(config.get("num_key_value_heads") or query)
        size = int(config.get("head_dim") or int(config["hidden_size"]) // query)
        return cls(query, key_value, size)

    def value_rows(self) -> Tensor:
        """For every input channel of the output projection, the row of the value projection that it reads."""
        head = torch.arange(self.query) // (self.query // self.key_value)
        return (head[:, None] * self.size + torch.arange(self.size)).reshape(-1)


def live_feeds(
    facts: Architecture,
    prefix: str,
    weights: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme | None],
    stats: Mapping[Stage, Stats],
    heads: Heads,
    held: Mapping[Stage, Stats] | None = None,
) -> Iterator[LiveFeed]:
    """Every input that linears of the block share, with its producer where the architecture's is known.

    `schemes` maps linear names to their scheme (None where they stay), `prefix` ends with a dot. `held` are statistics
    of tokens kept out of the search.
    """
    remaining = dict(stats)
    for feed in facts.feeds:
        for expert in _experts(feed, prefix, weights):
            names = [prefix + target.replace("*", expert) for target in _expanded(feed, prefix, weights, expert)]
            stages = [stage for stage in remaining if set(stage) <= set(names)]
            if not stages:
                continue
            parts = [remaining.pop(stage) for stage in stages]
            found = _merged(parts)
            kept = None if held is None else _merged([held[stage] for stage in stages])
            readers = names + [prefix + other for other in feed.also]
            targets = [Target(name, weights[f"{name}.weight"], schemes.get(name)) for name in readers]
            source = _source(feed, facts, prefix, expert, weights, heads)
            yield LiveFeed(source, targets, found, kept, parts if len(parts) > 1 else ())
    for stage, seen in remaining.items():
        targets = [Target(name, weights[f"{name}.weight"], schemes.get(name)) for name in stage]
        yield LiveFeed(None, targets, seen, None if held is None else held[stage])


def _expanded(feed: Feed, prefix: str, weights: Mapping[str, Tensor], expert: str) -> Sequence[str]:
    """Target names; a norm before experts feeds those of every expert."""
    if feed.kind == "linear" or not any("*" in target for target in feed.targets):
        return feed.targets
    del expert
    numbers = _numbers(feed.targets[0], prefix, weights)
    return [target.replace("*", number) for number in numbers for target in feed.targets]


def _experts(feed: Feed, prefix: str, weights: Mapping[str, Tensor]) -> list[str]:
    return _numbers(feed.source, prefix, weights) if "*" in feed.source else [""]


def _numbers(pattern: str, prefix: str, weights: Mapping[str, Tensor]) -> list[str]:
    expression = re.compile(re.escape(prefix + pattern + ".weight").replace(r"\*", r"(\d+)"))
    found = [match[1] for name in weights if (match := expression.fullmatch(name))]
    return sorted(found, key=int)


def _source(
    feed: Feed, facts: Architecture, prefix: str, expert: str, weights: Mapping[str, Tensor], heads: Heads
) -> Source | None:
    name = prefix + feed.source.replace("*", expert)
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    if weight is None:
        return None
    if feed.kind == "norm":
        return Source("norm", name, weight, bias, offset=facts.norm_offset)
    rows = slice(None)
    if feed.part == "v":
        rows = slice((heads.query + heads.key_value) * heads.size, None)
    elif feed.part == "up":
        rows = slice(weight.shape[0] // 2, None)
    values = feed.part == "v" or feed.source.endswith("v_proj")
    shared = heads.value_rows().to(weight.device) if values and heads.query != heads.key_value else None
    return Source("linear", name, weight[rows], None if bias is None else bias[rows], shared=shared)


def _merged(stats: Sequence[Stats]) -> Stats:
    total = stats[0]
    for more in stats[1:]:
        total = total.merge(more)
    return total
