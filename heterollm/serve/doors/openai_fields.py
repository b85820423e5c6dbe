"""Parameters of other programs: the same under another name, without effect, or refused with a hint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from heterollm.serve.errors import RequestError

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        # OpenAI
        "audio": (None,),
        "best_of": (None, 1),
        "echo": (None, False),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "parallel_tool_calls": (None, True, False),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "suffix": (None, ""),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
        # llama.cpp
        "cache_prompt": (None, True),
        "chat_template_kwargs": (None, {}),
        "dry_multiplier": (None, 0),
        "dynatemp_range": (None, 0),
        "id_slot": (None, -1),
        "lora": (None, []),
        "mirostat": (None, 0),
        "n_keep": (None, 0),
        "n_probs": (None, 0),
        "repeat_last_n": (None, -1),
        "samplers": (None,),
        "t_max_predict_ms": (None, 0, -1),
        "tfs_z": (None, 1),
        "top_n_sigma": (None, -1, 0),
        "typical_p": (None, 1),
        "xtc_probability": (None, 0),
        # vLLM and SGLang
        "add_generation_prompt": (None, True),
        "allowed_token_ids": (None,),
        "bad_words": (None, []),
        "early_stopping": (None, False),
        "guided_grammar": (None,),
        "guided_regex": (None,),
        "include_stop_str_in_output": (None, False),
        "length_penalty": (None, 1),
        "min_tokens": (None, 0),
        "prompt_logprobs": (None, 0),
        "skip_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True),
        "stop_token_ids": (None, []),
        "structured_outputs": (None,),
        "use_beam_search": (None, False),
        # Ollama
        "format": (None, ""),
        "num_ctx": (None,),
        "num_keep": (None, 0),
        "options": (None, {}),
        "images": (None, []),
        "think": (None, False),
    }
)
"""Parameters without support, and their values without effect, which the server takes."""

IGNORED: Final = (
    *("metadata", "prompt_cache_options", "prompt_cache_retention", "store"),
    # Without effect as long as the parameter that they belong to has none.
    *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("mirostat_eta", "mirostat_tau", "xtc_threshold"),
    "keep_alive",
)
"""Parameters that change no answer."""

HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cache_prompt": "A request with a seed or temperature 0 does not depend on earlier ones.",
        "echo": "The answer begins behind the prompt.",
        "format": "Use response_format.",
        "functions": "Use tools.",
        "guided_grammar": "Use grammar, with a grammar of Lark.",
        "guided_regex": "Use grammar: start: /…/.",
        "min_tokens": "Use ignore_eos with max_tokens.",
        "n_probs": "Use logprobs and top_logprobs.",
        "num_ctx": "`heterollm serve --context` sets the context.",
        "options": "Write them beside messages: temperature, max_tokens and others.",
        "prompt_logprobs": "Log-probabilities are those of the answer.",
        "repeat_last_n": "repetition_penalty counts all tokens.",
        "samplers": "The order is: penalties, temperature, top_k, top_p, min_p.",
        "skip_special_tokens": "The text has none; logprobs name them.",
        "stop_token_ids": "Use stop, with the spelling of the special token.",
        "structured_outputs": "Use response_format or grammar.",
        "tools": "Use /v1/chat/completions.",
    }
)


UNLIMITED: Final = (1 << 31) - 1
"""More tokens than any context holds."""


def _limit(value: object) -> object:
    """Return a number of tokens; -1, and Ollama's -2, stand for as many as the context holds."""
    return UNLIMITED if value in (-1, -2) else value


def _schema(value: object) -> object:
    return None if value is None else {"type": "json_schema", "json_schema": {"schema": value}}


def _choice(value: object) -> object:
    """Return the grammar of one of some texts."""
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise RequestError("guided_choice is no list of texts.", param="guided_choice")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)


RENAMED: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = MappingProxyType(
    {
        "guided_choice": ("grammar", _choice),
        "guided_json": ("response_format", _schema),
        "json_schema": ("response_format", _schema),
        "max_new_tokens": ("max_tokens", _limit),
        "n_predict": ("max_tokens", _limit),
        "num_predict": ("max_tokens", _limit),
        "repeat_penalty": ("repetition_penalty", lambda value: value),
    }
)
"""Parameters of other programs that mean the same here, with the name and the value here."""


def settle_fields(data: dict[str, Any], known: Sequence[str]) -> None:
    """Rename and remove a body's fields of other names, in place.

    Args:
        data: The body.
        known: BodyPart that the server takes as they are.

    Raises:
        RequestError: A field has a value with an effect that the server does not have, or is there twice.
    """
    for name, (own, converted) in RENAMED.items():
        if name in data:
            value = converted(data.pop(name))
            if own in data and data[own] is not None and value is not None:
                raise RequestError(f"{name} and {own} are both given.", param=name)
            data[own] = data.get(own) if value is None else value
    for name, neutral in NEUTRAL.items():
        if name in data and name not in known:
            value = data.pop(name)
            # True equals 1, but does not mean it.
            if not any(type(value) is type(one) and value == one for one in _also_floats(neutral)):
                raise RequestError(
                    f"The parameter {name} is not supported.",
                    fix=HINTS.get(name, "Leave it out."),
                    param=name,
                    code="unsupported_parameter",
                )
    for name in IGNORED:
        if name not in known:
            data.pop(name, None)
    for name in ("max_tokens", "max_completion_tokens"):
        if name in data:
            data[name] = _limit(data[name])
    if type(data.get("top_k")) is int and data["top_k"] == -1:
        data["top_k"] = 0  # all tokens, for llama.cpp and vLLM


def _also_floats(values: tuple[Any, ...]) -> list[Any]:
    return [*values, *(float(value) for value in values if type(value) is int)]
