"""Writes smollm2.json: what transformers' generate says to each prompt. Imports no octavo.

    python tests/golden/make_smollm2.py PATH_OF_THE_GGUF_FILE

Each entry: kind, the prompt's ids, the greedy tokens (up to 64), and of each of these the runner-up and the gap between
the two logits in fp32, by which a test recognises a tie.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from smollm2_prompts import prompts

NEW_TOKENS = 64


def main(gguf: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    entries = []
    for kind, prompt in prompts():
        if isinstance(prompt, str):
            ids = tokenizer(prompt).input_ids
        else:
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False).input_ids
        entries.append({"kind": kind, "prompt": prompt, "ids": ids} | greedy(model, ids))
        print(len(entries), kind, len(ids), repr(tokenizer.decode(entries[-1]["tokens"]))[:100], flush=True)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(e, ensure_ascii=False) for e in entries)
    out = Path(__file__).with_name("smollm2.json")
    out.write_text(f'{{"made_with": {json.dumps(versions)}, "entries": [\n{lines}\n]}}\n')


def greedy(model: torch.nn.Module, ids: list[int]) -> dict[str, list]:
    made = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = torch.stack([x[0] for x in made.logits]).topk(2)
    return {
        "tokens": made.sequences[0, len(ids) :].tolist(),
        "second": top.indices[:, 1].tolist(),
        "gap": [round(a - b, 7) for a, b in top.values.tolist()],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
