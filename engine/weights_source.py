"""Where an engine's weights come from: arrays of a user's, a checkpoint, or a seed. At the start, and once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..models.interface import ModelSpec, map_tree
from ..models.stage import stage_tree
from .backend import Backend
from .config import EngineConfig
from .loading.checkpoint import Checkpoint
from .loading.fitted import fit_arrays
from .loading.weights import dummy_weights, load_weights
from .parallel.team import Load
from .parallel.world import World


@dataclass(frozen=True)
class WeightsSource:
    """Gives placed weights. `given` is the model as its user knows it, `model` as these devices share it, of which this
    process may have one stage, with these layers.
    """

    config: EngineConfig
    given: ModelSpec
    model: ModelSpec
    checkpoint: Checkpoint | None
    backend: Backend
    world: World | None
    stage: range | None = None

    def first(self, weights: Any) -> dict[str, Any]:
        """Those that the engine begins with. `weights` is a tree of arrays for a ModelSpec, or None."""
        if weights is not None and self.checkpoint:
            raise ValueError("weights= goes with a ModelSpec as model: a checkpoint brings its own")
        if weights is not None and self.config.load_format == "dummy":
            raise ValueError("weights= and load_format='dummy': give one of them")
        if weights is None and not self.has_own:
            raise ValueError("a ModelSpec as model needs weights=, or load_format='dummy'")
        return self.again(weights)

    def again(self, weights: Any = None) -> dict[str, Any]:
        """The tree of arrays placed; None: the engine's own weights, from where they came."""
        if weights is not None:
            fitted = fit_arrays(weights, self.given, self.model, self.config.num_dealt)
            specs = self.model.weights
            if self.stage is not None:
                specs, fitted = (stage_tree(self.model, self.stage, tree) for tree in (specs, fitted))
            return map_tree(lambda s, x: self.backend.place_weight(np.asarray(x), s), specs, fitted)
        if self.config.load_format == "dummy":
            return dummy_weights(self.model, self.backend, self.config.seed, self.stage)
        assert self.checkpoint
        if self.world and self.world.leader:
            # rank 0 converts for all
            self.world.leader.await_load()
        try:
            return load_weights(self.model, self.checkpoint.tensors, self.backend, self.stage)
        finally:
            # also if it fails: the others wait
            if self.world and self.world.team:
                self.world.team.tell(Load())

    @property
    def has_own(self) -> bool:
        """Whether the weights can be had without the user."""
        return self.checkpoint is not None or self.config.load_format == "dummy"

    def check(self, weights: Any) -> None:
        """Raises ValueError if `again` could not make anything of it."""
        if weights is None:
            if not self.has_own:
                raise ValueError("this engine's weights were given as arrays and are gone: wake_up(weights=...)")
            return
        _check_tree("weights", self.given.weights, weights)


def _check_tree(name: str, specs: Any, tree: Any) -> None:
    """Raises ValueError unless the tree has the specs' names and shapes."""
    if isinstance(specs, dict):
        if not isinstance(tree, dict) or tree.keys() != specs.keys():
            raise ValueError(f"{name} is not a dict of {', '.join(specs)}")
        for key, spec in specs.items():
            _check_tree(f"{name}[{key!r}]", spec, tree[key])
    elif isinstance(specs, list | tuple):
        if not isinstance(tree, list | tuple) or len(tree) != len(specs):
            raise ValueError(f"{name} is not a list of {len(specs)}")
        for i, (spec, x) in enumerate(zip(specs, tree, strict=True)):
            _check_tree(f"{name}[{i}]", spec, x)
    elif np.shape(tree) != tuple(specs.shape):
        raise ValueError(f"{name} has shape {np.shape(tree)}, and the model wants {tuple(specs.shape)}")
