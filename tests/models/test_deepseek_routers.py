"""DeepSeek's routers and expert layers against transformers' modules; the whole models wait for their attention."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import transformers
from backends import BACKENDS
from tolerances import tolerance
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from octavo.engine.backend import get_backend
from octavo.engine.loading.arrange import arrange
from octavo.engine.loading.tree import Leaf
from octavo.models import moe
from octavo.models.interface import ArraySpec, Mixture, Routing, Step
from octavo.models.layers import split
from octavo.models.registry import spec_from_hf

SIZES = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts_per_tok": 4, "n_shared_experts": 2}
V3 = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_routed_experts": 16}
V2 = {"n_routed_experts": 16, "routed_scaling_factor": 16.0}
CASES = {
    "V3": (V3, Routing(4, "sigmoid", True, 2.5, 4, 2, 2, float32=True)),
    "V3-weights-as-they-are": (
        V3 | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        Routing(4, "sigmoid", False, 2.5, float32=True),
    ),
    "V2-greedy": (V2 | {"topk_method": "greedy"}, Routing(4, scale=16.0, float32=True)),
    "V2-groups": (
        V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        Routing(4, scale=16.0, num_groups=4, num_top_groups=2, float32=True),
    ),
}


class Tensors:
    """A module's state as a checkpoint would hold it."""

    def __init__(self, module):
        state = {name: x.numpy() for name, x in module.state_dict().items()}
        up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
        for i, (both, one) in enumerate(zip(up, down, strict=True)):
            gate, upper = np.split(both, 2)
            state |= {f"experts.{i}.{n}_proj.weight": x for n, x in (("gate", gate), ("up", upper), ("down", one))}
        self.state = state

    def get(self, name):
        return self.state[name]


def make(case):
    config, routing = CASES[case]
    name = "DeepseekV3" if case.startswith("V3") else "DeepseekV2"
    torch.manual_seed(0)
    kind = DeepseekV3MoE if name == "DeepseekV3" else DeepseekV2Moe
    module = kind(getattr(transformers, f"{name}Config")(**SIZES | config)).eval()
    with torch.no_grad():
        for x in module.parameters():
            x.normal_(0, 0.2)
        if name == "DeepseekV3":
            module.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    mixture = Mixture(16, 24, (0,), routing, shared_dim=48)
    specs, sources = split(moe.weights_of(32, mixture, ""))
    tensors = Tensors(module)
    weights = {k: arrange(Leaf(k, specs[k], sources[k], np.dtype("float32")), tensors, {}) for k in specs}
    return module, mixture, specs, weights


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_expert_layers_are_those_of_transformers(case, backend):
    module, mixture, specs, weights = make(case)
    x = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
    with torch.no_grad():
        want = module(torch.from_numpy(x)[None])[0].numpy()
    backend = get_backend(backend)
    placed = {k: backend.place_weight(v, specs[k]) for k, v in weights.items()}
    real = backend.place(np.ones(50, bool), ArraySpec((50,), (None,), "bool"))
    step = Step(*[None] * 3, real, *[None] * 5, False, {}, {})  # pyright: ignore[reportArgumentType]
    rows = backend.place(x, ArraySpec(x.shape, (None, None)))
    nothing = backend.place(np.zeros_like(x), ArraySpec(x.shape, (None, None)))
    got = backend.read(moe.add_experts(placed, nothing, rows, None, step, backend.ops, mixture.routing))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("float32", "logits"))
    exact = oracle.experts(mixture, oracle.as_float64(weights), x.astype(np.float64))
    np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance("float32", "logits"))


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_whole_models_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name}ForCausalLM is not supported: its latent attention"):
        spec_from_hf(getattr(transformers, f"{name}Config")().to_dict() | {"architectures": [f"{name}ForCausalLM"]})
