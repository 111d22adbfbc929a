"""Weights from a checkpoint or from a seed, as the model's specs and name map declare them.

Loading streams: one leaf at a time is read, arranged, placed and dropped, so that the peak of memory is what is
placed plus a leaf or two.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ...models.interface import ModelSpec, leaves
from ...models.stage import stage_tree
from .arrange import arrange
from .converted import CorruptError, converted_path, keeping, open_converted
from .experts import with_expert_names
from .source import TensorSource
from .tree import Here, Leaf, Placer, everywhere, leaves_of, map_leaves, place_tree

log = logging.getLogger(__name__)

# what Hugging Face ignores too: tables in older checkpoints, and the unembedding of a model that is tied
HARMLESS = ("rotary_emb.inv_freq", "lm_head.weight")
NUM_DUMMY = 65_537  # different numbers in a dummy leaf; a prime, so that the rows of a matrix differ


def load_weights(model: ModelSpec, source: TensorSource, backend: Placer, stage: range | None = None) -> dict[str, Any]:
    """The weights tree of a model, or of a stage of it with these layers, read from `source` and placed.

    What another stage has is read only where the whole is being converted. Raises ValueError listing tensors that are
    missing, that nothing asks for, or whose shape does not fit.
    """
    source = with_expert_names(source) if model.mixture else source
    check_names(model, source)

    def make(leaf: Leaf) -> np.ndarray:
        return arrange(leaf, source, model.pattern_sizes)

    if source.identity is None:
        return _of_stage(model, stage, lambda here: place_shards(model, source, backend, here))
    path = converted_path(source.identity, model, backend.dtype)
    if path.exists():
        try:
            return _of_stage(model, stage, lambda here: place_tree(open_converted(path), model, backend, here))
        except CorruptError as error:
            log.warning("converted weights are made anew: %s", error)
    with keeping(path, leaves_of(model, backend.dtype)) as keep:

        def convert(here: Here) -> dict[str, Any]:
            def place(leaf: Leaf) -> Any:
                value = leaf.source if isinstance(leaf.source, np.ndarray) else keep(leaf, make(leaf))
                return backend.place_weight(value, leaf.spec) if here(leaf) else None

            return map_leaves(place, model, backend.dtype)

        return _of_stage(model, stage, convert)


def _of_stage(model: ModelSpec, stage: range | None, load: Callable[[Here], dict[str, Any]]) -> dict[str, Any]:
    """What `load` makes of a whole model where only some leaves are to be placed: the tree of the stage."""
    if stage is None:
        return load(everywhere)
    # which those are, said by a tree of their paths
    whole: dict[str, Any] = map_leaves(lambda leaf: leaf.path, model, "float32")
    paths = set(leaves(stage_tree(model, stage, whole)))
    return stage_tree(model, stage, load(lambda leaf: leaf.path in paths))


def place_shards(model: ModelSpec, source: TensorSource, backend: Placer, here: Here = everywhere) -> dict[str, Any]:
    """The weights placed one by one; of each only what lies on this process's device is read."""

    def place(leaf: Leaf) -> Any:
        if not here(leaf):
            return None
        if isinstance(leaf.source, np.ndarray):
            return backend.place_weight(leaf.source, leaf.spec)
        return backend.place_shard(arrange(leaf, source, model.pattern_sizes, backend.shard(leaf.spec)), leaf.spec)

    return map_leaves(place, model, backend.dtype)


def check_names(model: ModelSpec, source: TensorSource) -> None:
    """Raises ValueError listing the tensors that the model wants and the source lacks, and the reverse."""
    wanted = {name for leaf in leaves_of(model, "float32") for name in leaf.names}
    found = set(source.names())
    missing = sorted(wanted - found)
    unexpected = sorted(name for name in found - wanted if not name.endswith(HARMLESS))
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not fit the model {model.name!r}: "
            f"missing tensors: {', '.join(missing) or 'none'}; unexpected tensors: {', '.join(unexpected) or 'none'}"
        )
    if found > wanted:
        log.info("tensors that the model %r does not need: %s", model.name, ", ".join(sorted(found - wanted)))


def dummy_weights(model: ModelSpec, backend: Placer, seed: int = 0, stage: range | None = None) -> dict[str, Any]:
    """Weights without any file: the same for the same seed, each leaf independent of the others and of their order.
    Those of a model, or of a stage of it.

    Made for speed, not for quality: normal numbers of deviation 0.02, of which a leaf repeats 65,537.
    """

    def place(leaf: Leaf) -> Any:
        if isinstance(leaf.source, np.ndarray):
            return backend.place_weight(leaf.source, leaf.spec)
        if leaf.spec.init != "normal":
            return backend.place_weight(getattr(np, leaf.spec.init)(leaf.spec.shape, leaf.dtype), leaf.spec)
        return backend.place_repeated(_normal(_generator(seed, leaf), 0.02, NUM_DUMMY, leaf.dtype), leaf.spec)

    def load(here: Here) -> dict[str, Any]:
        return map_leaves(lambda leaf: place(leaf) if here(leaf) else None, model, backend.dtype)

    return _of_stage(model, stage, load)


def random_weights(model: ModelSpec, backend: Placer, seed: int = 0, scale: float = 0.2) -> dict[str, Any]:
    """Weights for tests: normal numbers of deviation `scale`, all different, from one generator a leaf."""

    def make(leaf: Leaf) -> np.ndarray:
        if leaf.spec.init != "normal":
            return getattr(np, leaf.spec.init)(leaf.spec.shape, leaf.dtype)
        return _normal(_generator(seed, leaf), scale, leaf.spec.shape, leaf.dtype)

    return place_tree(make, model, backend)


def _generator(seed: int, leaf: Leaf) -> np.random.Generator:
    return np.random.default_rng((seed, zlib.crc32(leaf.path.encode())))


def _normal(rng: np.random.Generator, scale: float, shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    x = rng.standard_normal(shape, np.float32)
    x *= np.float32(scale)
    return x.astype(dtype, copy=False)
