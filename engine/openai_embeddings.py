"""Bodies for /v1/embeddings, and the answers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .checks import choice
from .openai_protocol import checked, given_fields, prompts_of, text_of_field
from .pooling import EmbeddingRequestOutput, PoolingParams
from .prompts import Prompt

FIELDS = frozenset(("model", "input", "encoding_format", "dimensions", "request_id", "normalize", "pooling"))
ENCODINGS = ("float", "base64")


@dataclass(frozen=True)
class EmbeddingAsk:
    """What one body asks for: a vector for each of `prompts`."""

    prompts: tuple[Prompt, ...]
    params: PoolingParams
    encoding: str = "float"  # or "base64": of little-endian float32
    request_id: str | None = None


def embedding_ask(body: Any) -> EmbeddingAsk:
    """What a body for /v1/embeddings asks for."""
    given = given_fields(body, FIELDS)
    params = {name: given[name] for name in ("dimensions", "normalize", "pooling") if name in given}
    return EmbeddingAsk(
        prompts=tuple(prompts_of(given.get("input"), "input")),
        params=PoolingParams(**params),
        encoding=checked(choice, "encoding_format", given.get("encoding_format", "float"), ENCODINGS),
        request_id=text_of_field(given, "request_id"),
    )


def embedding_response(
    ask: EmbeddingAsk, outputs: Sequence[EmbeddingRequestOutput], *, model: str
) -> Mapping[str, Any]:
    """The answer: `outputs` has the vector of each prompt."""
    num_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(ask, o.outputs.embedding)}
        for i, o in enumerate(outputs)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(ask: EmbeddingAsk, vector: Sequence[float]) -> Any:
    if ask.encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
