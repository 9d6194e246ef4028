"""A tokenizer of bytes, for small models that tests and benchmarks make."""

from __future__ import annotations

from pathlib import Path


def write_tokenizer(folder: Path) -> None:
    """A token for every byte, and beyond them <s>, </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
