"""A checkpoint's vocabulary in the form that llguidance asks for."""

from __future__ import annotations

from typing import Final

from heterollm.text.tokenizer import Tokenizer

BEFORE: Final = ("", "\n", "\x02")
"""Texts to encode before another, so that a tokenizer that begins texts with a space adds none to it."""

LONGEST: Final = 256
"""Characters to encode: before each token llguidance asks for those of all text that must follow, and only
the first one counts."""


class GrammarVocabulary:
    """The bytes of all tokens, and the tokens of a text.

    llguidance's own reader of `tokenizer.json` takes each added token of the shape ``<…>`` as special, and no
    text may hold it. Here only tokens without text are special.

    Args:
        tokenizer: The tokenizer.
        rows: Number of tokens; those that the tokenizer does not know have no bytes.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._backend.encode_special_tokens = True  # as the text that they are
        own, special = tokenizer.token_bytes, tokenizer.special_tokens
        self.special_token_ids: Final = sorted(special)
        self.tokens: Final = [
            special[index].encode() if index in special else own.of(index) or b"" for index in range(rows)
        ]
        self._byte_ids = {one[0]: index for index, one in enumerate(self.tokens) if len(one) == 1}
        self.eos_token_id: Final = min(tokenizer.eos_ids, default=0)
        self.bos_token_id: Final = None

    def __call__(self, text: str) -> list[int]:
        """Return the first tokens of a text, or all of a short one; their bytes, joined, are its own."""
        wanted = text[:LONGEST].encode()
        for before in BEFORE:
            ids: list[int] = self._backend.encode(before + text[:LONGEST], add_special_tokens=False).ids
            begin, left = len(ids), len(wanted)
            while begin and left > 0:
                begin -= 1
                left -= len(self.tokens[ids[begin]])
            if b"".join(self.tokens[index] for index in ids[begin:]) == wanted:
                return ids[begin:]
        # The tokenizer changes the text, by a normalizer for example.
        return [self._byte_ids[value] for value in wanted if value in self._byte_ids]
