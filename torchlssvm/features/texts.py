"""Text input: tokenize texts, and load an encoder of Hugging Face transformers with its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def as_batch(inputs: Any) -> Any:
    """Return a single text, image or path as a batch of one, and a batch unchanged.

    >>> as_batch("good film"), as_batch(["good", "bad"])
    (['good film'], ['good', 'bad'])
    """
    return [inputs] if isinstance(inputs, str) or not isinstance(inputs, Iterable) else inputs


class Tokenize:
    """Turn a list of texts into the input of an encoder: ``input_ids`` and ``attention_mask``, padded to the longest text.

    Args:
        tokenizer: a tokenizer of transformers, or any callable with the same arguments. Texts are truncated to its limit.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        limit = getattr(tokenizer, "model_max_length", None)
        self.max_length = limit if isinstance(limit, int) and limit < 10**6 else None

    def __call__(self, texts: Sequence[str]) -> dict[str, Any]:
        """Tokenize texts and return a dict of tensors (B, T)."""
        return dict(
            self.tokenizer(
                list(as_batch(texts)), padding=True, truncation=self.max_length is not None, max_length=self.max_length,
                return_tensors="pt",
            )
        )  # fmt: skip

    def __repr__(self) -> str:
        """Return the name and hash of the tokenizer, which are the same in each process, so that a store can compare them."""
        inner = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = inner.get_vocab(with_added_tokens=True) if inner is not None else self.tokenizer.get_vocab()
        content = hashlib.sha256(repr(sorted(vocabulary.items())).encode()).hexdigest()
        return f"Tokenize({type(self.tokenizer).__name__}, max_length={self.max_length}, vocabulary={content[:16]})"


def load_encoder(name: str, tokenizer: Any = None) -> tuple[nn.Module, Any]:
    """An encoder of transformers and its tokenizer, from a local folder or by name."""
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError(f"attach({name!r}) reads an encoder with transformers: pip install transformers") from error
    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # a bar for each tensor of the weights
    try:
        model: nn.Module = AutoModel.from_pretrained(name)
    finally:
        if shown:
            bars.enable_progress_bar()
    return model, AutoTokenizer.from_pretrained(name) if tokenizer is None else tokenizer


def is_encoder(model: nn.Module) -> bool:
    """True for an encoder of transformers: its configuration has the width of its hidden states."""
    config = getattr(model, "config", None)
    return any(isinstance(getattr(config, name, None), int) for name in ("hidden_size", "vocab_size"))
