"""What models there are in the caches, and what a checkpoint holds: for people, not for loading."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from .aliases import ALIASES, cached_path
from .checkpoint import find_model, open_model
from .converted import converted_dir


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache folder, or an alias that could be fetched into it (then `num_bytes` is None)."""

    name: str
    kind: str  # "alias", "hub" or "converted"
    path: str
    num_bytes: int | None


def list_models() -> list[CachedModel]:
    """The aliases, fetched or not; models in the hub's cache; and converted weights, which may be deleted any time."""
    aliases = [_entry(name, "alias", cached_path(name)) for name in sorted(ALIASES)]
    converted = [_entry(path.stem, "converted", path) for path in sorted(converted_dir().glob("*.safetensors"))]
    return aliases + _hub_models() + converted


def pull(name: str) -> Path:
    """Fetches the model of an alias or hub id, and returns its folder or file."""
    return find_model(name, "auto", None, None)


def inspect_checkpoint(name: str) -> dict[str, Any]:
    """What a checkpoint says about itself, tensor by tensor, without reading their content."""
    checkpoint = open_model(name)
    tensors = [checkpoint.tensors.stored(n) for n in checkpoint.tensors.names()]
    config = checkpoint.hf_config
    return {
        "path": str(checkpoint.path),
        "load_format": checkpoint.load_format,
        "architecture": ", ".join(config.get("architectures") or []),
        "num_params": sum(prod(t.shape) for t in tensors),
        "num_bytes": sum(t.num_bytes for t in tensors),
        "num_tensors": len(tensors),
        "dtypes": dict(Counter(t.dtype for t in tensors)),
        "config": {key: value for key, value in config.items() if key != "architectures"},
        "tensors": [asdict(t) for t in tensors],
    }


def _entry(name: str, kind: str, path: Path) -> CachedModel:
    return CachedModel(name, kind, str(path), path.stat().st_size if path.exists() else None)


def _hub_models() -> list[CachedModel]:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [CachedModel(r.repo_id, "hub", str(r.repo_path), r.size_on_disk) for r in repos if r.repo_type == "model"]
    return sorted(models, key=lambda model: model.name)
