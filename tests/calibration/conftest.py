"""Tiny tokenizers and models whose answers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(20)]


@pytest.fixture
def word_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Makes tokenizers for the words w0 … w19, whose ids are 3 … 22; `bos` says whether they add <s> by themselves."""

    def make(bos: bool = False, has_bos: bool = True) -> PreTrainedTokenizerFast:
        vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        special = {"bos_token": "<s>"} if has_bos else {}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", **special)

    return make


class BigramConfig(PreTrainedConfig):
    model_type = "bigram"

    def __init__(self, vocab_size: int = 2, **rest: object) -> None:
        super().__init__(vocab_size=vocab_size, **rest)


class OneHot(nn.Module):
    """The last hidden state of a token is its one-hot vector."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.kind = size, dtype

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(input_ids, self.size).to(self.kind))


class Bigram(PreTrainedModel):
    """The next token has the distribution `table[token]`, whatever came before: its perplexity is known on paper."""

    config_class = BigramConfig
    base_model_prefix = "model"

    def __init__(self, table: Tensor) -> None:
        super().__init__(BigramConfig(vocab_size=len(table)))
        self.model = OneHot(len(table), table.dtype)
        self.lm_head = nn.Linear(len(table), len(table), bias=False, dtype=table.dtype)
        # A constant on all logits of a row changes no distribution; it moves the normaliser away from zero.
        shift = torch.linspace(-30, 30, len(table), dtype=table.dtype).unsqueeze(1)
        self.lm_head.weight = nn.Parameter((table.log() + shift).T.contiguous())

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids=input_ids).last_hidden_state))


@pytest.fixture
def bigram() -> Callable[..., tuple[Bigram, Tensor]]:
    """Makes a bigram model and its table [size, size] of next-token probabilities."""

    def make(size: int, seed: int, dtype: torch.dtype = torch.float64, sharpness: float = 1.0) -> tuple[Bigram, Tensor]:
        noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        table = (noise * sharpness).softmax(1)
        return Bigram(table.to(dtype)), table

    return make
