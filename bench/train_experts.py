"""Trains a small mixture of experts, so that the popularity of its experts is real.

The architecture is Qwen3-MoE's with 8 experts, 2 for each token, 6 million parameters. Text and tokenizer are
those of the bundled model: the source of Python's standard library as installed with the interpreter, without
the modules that the bundled model holds out. The loss has a small part for balance, as published models have.

Equal options give equal weights with the same interpreter, PyTorch and number of threads. The last
line is JSON: perplexity on the held-out text, and how many of its tokens each expert of each layer gets.

    python bench/train_experts.py /tmp/experts-model
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sysconfig
import time
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from conditions import script_parser
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from heterollm.data import bundled_model

WINDOW: Final = 512
BATCH: Final = 2
WINDOWS: Final = 79
"""Windows of the held-out text: those of ``bench/perplexity.py``."""
HELD_OUT_OF: Final = 50
"""A module is held out if the CRC-32 of its path is a multiple of this, as for the bundled model."""
LEAST_CHARACTERS: Final = 200
PEAK_RATE: Final = 3e-3
LAST_SHARE: Final = 0.05
WARM_UP_STEPS: Final = 50
WEIGHT_DECAY: Final = 0.05
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")

CONFIG: Final[dict[str, Any]] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

Ids = NDArray[np.int64]


def training_windows(tokenizer: Tokenizer, count: int, seed: int) -> Ids:
    """Return windows ``[n, m]`` of the standard library's modules in random order, each after a BOS."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if "site-packages" in name.parts or zlib.crc32(name.as_posix().encode()) % HELD_OUT_OF == 0:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # tests of other encodings
            continue
        if len(text) >= LEAST_CHARACTERS:
            texts.append(text)
    np.random.default_rng(seed).shuffle(texts)
    ids = list[int]()
    for text in texts:
        if len(ids) >= count * WINDOW:
            break
        ids += [0, *tokenizer.encode(text).ids]
    if len(ids) < count * WINDOW:
        raise SystemExit(f"The standard library has {len(ids)} tokens, {count * WINDOW} are needed.")
    return np.array(ids[: count * WINDOW], np.int64).reshape(count, WINDOW)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: linear from 0, then half a cosine."""
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return PEAK_RATE * min(1, (step + 1) / WARM_UP_STEPS) * (LAST_SHARE + (1 - LAST_SHARE) * cosine)


def train(model: Qwen3MoeForCausalLM, windows: Ids, seed: int) -> None:
    """Train a model on windows, each once, in random order."""
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    batches = np.random.default_rng(seed).permutation(windows).reshape(-1, BATCH, WINDOW)
    begun = time.monotonic()
    model.train()
    for step, ids in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches))
        batch = torch.from_numpy(ids)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            seconds = time.monotonic() - begun
            print(f"step {step} of {len(batches)}, {seconds:.0f} s, loss {loss:.3f}", flush=True)


def held_out_windows(tokenizer: Tokenizer, count: int = WINDOWS) -> Iterator[torch.Tensor]:
    """Yield windows ``[1, m]`` of the bundled model's held-out text."""
    ids = tokenizer.encode((bundled_model() / "held_out.txt").read_text("utf-8")).ids
    for first in range(0, count * WINDOW, WINDOW):
        yield torch.tensor([ids[first : first + WINDOW]])


@torch.no_grad()
def evaluate(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer) -> tuple[float, list[list[int]]]:
    """Return perplexity on the held-out text, and the number of its tokens by layer and expert."""
    counts = np.zeros((model.config.num_hidden_layers, model.config.num_experts), np.int64)
    routers = [one for one in model.modules() if isinstance(one, Qwen3MoeTopKRouter)]

    def count(layer: int, chosen: torch.Tensor) -> None:
        counts[layer] += np.bincount(chosen.numpy().ravel(), minlength=counts.shape[1])

    hooks = [
        router.register_forward_hook(lambda _module, _inputs, made, layer=layer: count(layer, made[2]))
        for layer, router in enumerate(routers)
    ]
    model.eval()
    losses = []
    for ids in held_out_windows(tokenizer):
        logits = model(ids, output_router_logits=False).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    for hook in hooks:
        hook.remove()
    return math.exp(float(np.mean(losses))), counts.tolist()


def main() -> None:
    """Train, save and measure."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("folder", type=Path, help="Hugging Face checkpoint to write, in bfloat16.")
    parser.add_argument("--steps", type=int, default=1000, help=f"Of {BATCH} windows of {WINDOW} tokens.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(bundled_model() / "tokenizer.json"))
    windows = training_windows(tokenizer, options.steps * BATCH, options.seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    parameters = sum(one.numel() for one in model.parameters())
    print(f"{parameters} parameters, {windows.size} tokens", flush=True)
    begun = time.monotonic()
    train(model, windows, options.seed)
    seconds = round(time.monotonic() - begun)
    model = model.to(torch.bfloat16)
    model.config.output_router_logits = False
    model.save_pretrained(options.folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(bundled_model() / name, options.folder / name)
    perplexity, counts = evaluate(model.float(), tokenizer)
    found = {
        "seed": options.seed,
        "threads": options.threads,
        "steps": options.steps,
        "tokens": windows.size,
        "seconds": seconds,
        "parameters": parameters,
        "perplexity": round(perplexity, 4),
        "counts": counts,
        "imbalance": [round(max(own) * len(own) / sum(own), 3) for own in counts],
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
