"""Properties of tokens that GGUF files do not store, and that llama.cpp knows by names of tokens and models.

Source: ``llama_vocab::impl::load`` in
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
SPECIAL: Final = (UNKNOWN, CONTROL)

END_TEXTS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
        *("<|end_of_text|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]"),
        *("[EOS]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Tokens that end an answer, whatever the metadata says."""
FILE_ENDS: Final = frozenset(
    {
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    }
)
"""Tokens that end a file of a repository, and so an answer."""
GAPS: Final = frozenset(
    {
        *(
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ),
        *(
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ),
        *(
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ),
        *("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    }
)
"""Tokens of prompts with a gap."""
CHANNELS: Final = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""Tokens of the harmony format, which are text."""

PHI3: Final = ("phi-3", "phi3")
PLAIN_MARKS: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def end_texts(tokens: Sequence[str]) -> frozenset[str]:
    """Return the texts of a vocabulary's tokens that end an answer."""
    found = (END_TEXTS | FILE_ENDS) & set(tokens)
    calls = bool(found & {"<|call|>", "<|calls|>"})
    if calls and found & {"<|return|>", "<|flush|>"}:
        found -= {"<|end|>"}  # ends a message there, not the answer
    return found - {"</s>"} if "<|tool_response>" in found else found


def token_kinds(tokens: Sequence[str], kinds: Sequence[int]) -> Iterator[int]:
    """Yield the kind of each token; tokens with a known text are control tokens, whatever the file says."""
    known = END_TEXTS | FILE_ENDS | GAPS
    messages = "<|end|>" not in end_texts(tokens)
    for text, kind in zip(tokens, kinds, strict=True):
        if text in CHANNELS or (text == "<|end|>" and messages):
            yield USER_DEFINED
        else:
            yield CONTROL if text in known else kind


def stripping(metadata: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Return whether a special token strips white space to its left or right, as ``AddedToken`` takes it.

    llama.cpp compares the name without regard to case; here spaces and underscores stand for hyphens too, as
    newer converters write ``Phi 3.5 Mini``.
    """
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    name = str(metadata.get("general.name", "")).lower().replace(" ", "-").replace("_", "-")
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return {"lstrip": text == "<mask>"}
    if any(part in name for part in PHI3):
        return {"rstrip": text not in PLAIN_MARKS}
    return {"lstrip": "modern-bert" in name and text == "[MASK]"}
