"""The worked example of docs/add_a_model.md, run as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tiny_hf
from backends import BACKENDS
from model_harness import all_logits, read_checkpoint
from tolerances import tolerance

from octavo.engine.backend import get_backend
from octavo.models import registry

DOC = Path(__file__).parents[2] / "docs" / "add_a_model.md"
MODEL, REGISTRY_LINE, CASE = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)


@pytest.fixture
def granite(monkeypatch):
    """The example's module, registered by the example's line."""
    module = types.ModuleType("octavo.models.granite")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__package__ = "octavo.models"
    exec(compile(MODEL, str(DOC), "exec"), module.__dict__)
    for name, from_hf in eval("{" + REGISTRY_LINE + "}", {"granite": module}).items():
        monkeypatch.setitem(registry.ARCHITECTURES, name, from_hf)
    return module


def test_example_takes_under_80_lines():
    assert len(MODEL.splitlines()) < 80
    assert len(REGISTRY_LINE.splitlines()) == len(CASE.splitlines()) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_example_agrees_with_transformers(granite, backend, tmp_path):
    (_, (name, config)), *_ = eval("{" + CASE + "}").items()
    hf = tiny_hf.make(name, **config)
    model = registry.spec_from_hf(tiny_hf.save(hf, tmp_path))
    ids = np.random.default_rng(5).integers(0, 512, 300).tolist()
    ours = all_logits(model, read_checkpoint(model, tmp_path), get_backend(backend), ids)
    np.testing.assert_allclose(ours, tiny_hf.logits(hf, ids), rtol=0, atol=tolerance("float32", "logits"))
