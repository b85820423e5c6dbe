"""Copies of checkpoints with the files by which sentence-transformers declares a pooling."""

import json
from pathlib import Path
from typing import Any

TYPES = {
    name: f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize", "Dense")
}


def declare(folder: Path, *names: str, most: int | None = 512, **pooling: Any) -> Path:
    """Write the files of sentence-transformers."""
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": TYPES[name]}
        for index, name in enumerate(("Transformer", *names))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    settings = {"word_embedding_dimension": 128, "include_prompt": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**settings, **pooling}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    return folder


def end_with(folder: Path, token: str) -> None:
    """Let the tokenizer end every text with a token, as Qwen3-Embedding's does."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    index = next(one["id"] for one in data["added_tokens"] if one["content"] == token)
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
    path.write_text(json.dumps(data))
