"""SmolLM2's GGUF file as a folder of safetensors, which every engine reads: the weights as they are in float32.

    python benchmarks/hf_folder.py FOLDER

transformers does the conversion, so that what peers are given does not depend on octavo's own reader.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from octavo.engine.loading.aliases import fetch


def write_folder(folder: Path) -> Path:
    """Makes the folder unless it is there; returns it."""
    if folder.exists():
        return folder
    import torch
    import transformers
    from safetensors.torch import save_file

    path = fetch("smollm2")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    weights = {name: x.contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        raise ValueError(f"{path}: expected tied embeddings, whose head need not be written")
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    # whole or not at all
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(config, indent=1, default=str))
    try:
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(write_folder(parser.parse_args().folder))


if __name__ == "__main__":
    main()
