"""Loading streams: the memory that a fresh process needs beyond what it places is a tensor or two.

The child loads; the test reads its RssAnon all the while, which is memory of its own, not pages of mapped files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from backends import BACKENDS
from embedded import embedded_model

from octavo.engine.loading.checkpoint import open_model

CHILD = """
import json, sys
import numpy as np
from octavo.engine.backend import get_backend
from octavo.engine.loading.checkpoint import open_model
from octavo.engine.loading.weights import load_weights
from octavo.models.interface import ArraySpec, leaves
from octavo.models.registry import spec_from_hf

if sys.argv[4] == "pt":
    import torch
backend = get_backend(sys.argv[1], {"dtype": sys.argv[2]})
spec = ArraySpec((64, 64), (None, None), product="tf,fe->te")
backend.place_weight(np.ones((64, 64), np.float32), spec)
print("ready", flush=True)
sys.stdin.readline()
checkpoint = open_model(sys.argv[3], load_format=sys.argv[4])
weights = load_weights(spec_from_hf(checkpoint.hf_config), checkpoint.tensors, backend)
print(json.dumps({"placed": sum(x.nbytes for x in leaves(weights))}), flush=True)
"""
ALLOWED = 1.3
# the JAX backend refuses bfloat16 on a CPU
CASES = [case for case in (("jax", "float32"), ("torch", "float32"), ("torch", "bfloat16")) if case[0] in BACKENDS]


def _rss_anon(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon: the child has ended")


def _load(backend: str, dtype: str, path: Path, load_format: str, cache: Path) -> tuple[int, int]:
    """Bytes placed, and the peak above what the child had after imports and the start of its backend."""
    command = [sys.executable, "-c", CHILD, backend, dtype, str(path), load_format]
    environment = os.environ | {"OCTAVO_CACHE": str(cache)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        before = peak = _rss_anon(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        while not (line := child.stdout.readline()):
            assert child.poll() is None, "the child failed"
            peak = max(peak, _rss_anon(child.pid))
            time.sleep(0.0005)
    return json.loads(line)["placed"], peak - before


def _assert_streams(placed: int, peak: int, largest: int) -> None:
    # an honest measurement: what was placed is at least there
    assert peak > 0.95 * placed
    allowed = ALLOWED * (placed + largest)
    assert peak < allowed, f"peak {peak / 1e6:.0f} MB, allowed {allowed / 1e6:.0f} MB for {placed / 1e6:.0f} MB placed"


# the whole model is converted each time: quickly, float32 on one backend and bfloat16 on the other
@pytest.mark.parametrize(
    "backend, dtype", [pytest.param(*c, marks=[pytest.mark.slow] * (c == ("torch", "float32"))) for c in CASES]
)
def test_a_gguf_file_streams_at_the_first_and_at_the_second_start(tmp_path, backend, dtype):
    path = embedded_model()
    source = open_model(path).tensors
    largest = max(source.nbytes(name) for name in source.names())
    for _ in ("first", "second"):
        placed, peak = _load(backend, dtype, path, "gguf", tmp_path)
        _assert_streams(placed, peak, largest)
    assert len(list((tmp_path / "converted").iterdir())) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of 220 MB in float32, in shards of two layers each."""
    e, f, v, n = 768, 2048, 8192, 6
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": v, "hidden_size": e, "intermediate_size": f,
        "num_hidden_layers": n, "num_attention_heads": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip
    shards = [{f"{name}.weight": (v, e) for name in ("model.embed_tokens", "lm_head")} | {"model.norm.weight": (e,)}]
    for i in range(n):
        rows = {"self_attn.q_proj": e, "self_attn.k_proj": e // 3, "self_attn.v_proj": e // 3, "self_attn.o_proj": e}
        layer = {name: (num, e) for name, num in (rows | {"mlp.gate_proj": f, "mlp.up_proj": f}).items()}
        layer |= {"mlp.down_proj": (e, f), "input_layernorm": (e,), "post_attention_layernorm": (e,)}
        if i % 2 == 0:
            shards.append({})
        shards[-1] |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    folder, where = tmp_path_factory.mktemp("sharded"), {}
    for i, shapes in enumerate(shards):
        name = f"model-0000{i + 1}-of-0000{len(shards)}.safetensors"
        safetensors.numpy.save_file({n: np.ones(shape, np.float32) for n, shape in shapes.items()}, folder / name)
        where |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("backend, dtype", CASES)
def test_sharded_safetensors_stream(folder, tmp_path, backend, dtype):
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    placed, peak = _load(backend, dtype, folder, "safetensors", tmp_path)
    _assert_streams(placed, peak, largest)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if "torch" in BACKENDS])
def test_bin_files_stream(folder, tmp_path, backend):
    import torch

    source = open_model(folder).tensors
    names, where = source.names(), {}
    for i in range(4):
        part = {name: torch.from_numpy(np.array(source.get(name))) for name in names[i::4]}
        torch.save(part, tmp_path / f"pytorch_model-{i}.bin")
        where |= dict.fromkeys(part, f"pytorch_model-{i}.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    largest = max(path.stat().st_size for path in tmp_path.glob("*.bin"))
    placed, peak = _load(backend, "float32", tmp_path, "pt", tmp_path)
    _assert_streams(placed, peak, largest)
