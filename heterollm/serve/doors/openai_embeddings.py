"""OpenAI's /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from heterollm.serve.about import About
from heterollm.serve.bodies import BodyPart, check_model, decoded
from heterollm.serve.doors.openai import Ids, prompts_of
from heterollm.serve.embedder import EmbeddingRequest, embedding_texts

MOST_TEXTS: Final = 2048


class _Body(BodyPart, frozen=True, kw_only=True):
    model: str
    input: str | Annotated[list[str | int | Ids], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


def embeddings_request(about: About, content: bytes) -> EmbeddingRequest:
    """Return the request in a body.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    body = decoded(content, _Body, about.llm.context)
    check_model(body.model, about.name)
    given = prompts_of(body.input, "input", MOST_TEXTS)
    texts = embedding_texts(about, given, dimensions=body.dimensions)

    def write(vectors: Sequence[NDArray[np.float32]], _seconds: float) -> dict[str, Any]:
        in_base64 = body.encoding_format == "base64"
        made = [_base64(vector) if in_base64 else vector.tolist() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(made)]
        usage = {"prompt_tokens": request.tokens, "total_tokens": request.tokens}
        return {"object": "list", "data": data, "model": about.name, "usage": usage}

    request = EmbeddingRequest(texts, body.dimensions, write)
    return request


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
