"""transformers as a subject of cross-checks: whole sequences at once, without a cache, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..loading.aliases import ALIASES, cached_path
from ..step_log import Entry


class HfSubject:
    """Knows each sequence as the steps tell it. Its taps are "embed", and "layer.i" but for the last layer's.

    transformers puts the final norm on the rows of the last layer; the logits stand for them.
    """

    name, dtype, has_cache, rounds = "hf", "float32", False, False

    def __init__(self, model: Any):
        try:
            import transformers
        except ImportError as error:
            raise ValueError("hf needs transformers: pip install 'octavo[dev]'") from error
        path = Path(cached_path(model) if model in ALIASES else model)
        if not path.exists():
            raise ValueError(f"hf needs a local folder or .gguf file, not {model!r}")
        where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if where else path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
        self.known: dict[str, list[int]] = {}
        self.seen: dict[str, tuple[list[np.ndarray], np.ndarray]] = {}

    def learn(self, sequences: dict[str, list[int]]) -> None:
        """Runs the whole of each sequence, so that any of its tokens can be looked up."""
        self.known = sequences
        self.seen = {name: self._run(ids) for name, ids in sequences.items()}

    @torch.inference_mode()
    def _run(self, ids: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        out = self.model(torch.tensor([list(ids)]), output_hidden_states=True)
        return [h[0].numpy() for h in out.hidden_states[:-1]], out.logits[0].numpy()

    def look(self, step: Entry) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Taps of a step's tokens, and the logits of its sampled rows."""
        chunks = step.plan.chunks
        rows = [[h[c.start : c.start + c.num_tokens] for h in self.seen[c.request_id][0]] for c in chunks]
        whole = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        names = ["embed", *(f"layer.{i}" for i in range(len(whole) - 1))]
        logits = [self.seen[c.request_id][1][c.start + c.num_tokens - 1] for c in chunks if c.samples]
        vocab_size = self.model.config.vocab_size
        return dict(zip(names, whole, strict=True)), np.array(logits).reshape(-1, vocab_size)

    def free_run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt."""
        outputs = []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(max_tokens):
                ids.append(int(self._run(ids)[1][-1].argmax()))
            outputs.append(ids[len(prompt) :])
        return outputs
