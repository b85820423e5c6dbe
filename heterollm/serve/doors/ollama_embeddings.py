"""Ollama's /api/embed, and /api/embeddings of earlier versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from heterollm.serve.about import About
from heterollm.serve.bodies import BodyPart, decoded
from heterollm.serve.doors.ollama import OllamaOptions, check_name
from heterollm.serve.doors.openai_embeddings import MOST_TEXTS
from heterollm.serve.embedder import EmbeddingRequest, embedding_texts


class _Body(BodyPart, frozen=True, kw_only=True):
    model: str
    # Without effect: a text has no answer, and the model is always loaded.
    options: OllamaOptions | None = None
    keep_alive: int | float | str | None = None


class _EmbedBody(_Body, frozen=True, kw_only=True):
    input: str | Annotated[list[str], Meta(max_length=MOST_TEXTS)]
    truncate: bool | None = None
    dimensions: int | None = None


class _OldBody(_Body, frozen=True, kw_only=True):
    prompt: str


def embed_request(about: About, content: bytes) -> EmbeddingRequest:
    """Return the request in a body; its embeddings have the length 1, as Ollama's.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    body = decoded(content, _EmbedBody, about.llm.context)
    check_name(body.model, about.name)
    given = [body.input] if isinstance(body.input, str) else body.input
    cut = body.truncate is not False
    texts = embedding_texts(about, given, dimensions=body.dimensions, cut=cut)

    def write(vectors: Sequence[NDArray[np.float32]], seconds: float) -> dict[str, Any]:
        return {
            "model": body.model,
            "embeddings": [(vector / np.linalg.norm(vector)).tolist() for vector in vectors],
            "total_duration": int(1e9 * seconds),
            "load_duration": 0,
            "prompt_eval_count": request.tokens,
        }

    request = EmbeddingRequest(texts, body.dimensions, write)
    return request


def old_embed_request(about: About, content: bytes) -> EmbeddingRequest:
    """Return the request for the embedding of one prompt; errors as for :func:`embed_request`."""
    body = decoded(content, _OldBody, about.llm.context)
    check_name(body.model, about.name)
    texts = embedding_texts(about, [body.prompt], cut=True, param="prompt")
    return EmbeddingRequest(texts, None, lambda vectors, _seconds: {"embedding": vectors[0].tolist()})
