"""The oracle of cross-checks, engine/lab/numpy_ops.py, held against that of the tests, which shares nothing with it."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from tiny import EIGHT_HEADS, PROMPTS, SHARED, TINY, numpy_weights, spec_of
from tolerances import tolerance

from octavo.engine.lab.subjects import make_request, make_subject


@pytest.mark.parametrize("config", [TINY, EIGHT_HEADS], ids=["windows", "groups"])
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_its_logits_are_those_of_a_dense_transformer(config, layout):
    """With chunks, hits, block tables and windows on the one side and none of them on the other."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 96, "block_size": 8, "layout": layout}
    subject = make_subject("oracle", spec_of(config), numpy_weights(config), options)
    prompts = [[*SHARED, 3, 4], PROMPTS[3], [1, 5, 9], [*SHARED, 8]]
    requests = [make_request(i, prompt, 5) for i, prompt in enumerate(prompts)]
    steps = list(subject.run(requests))
    assert subject.parts.scheduler.num_hit_tokens
    subject.learn({})
    dense = {r.id: oracle.logits(spec_of(config), numpy_weights(config), r.tokens) for r in requests}
    compared = 0
    for step in steps:
        _, logits_RV = subject.look(step)
        sampled = [dense[c.request_id][c.start + c.num_tokens - 1] for c in step.plan.sampled]
        for found, wanted in zip(logits_RV, sampled, strict=True):
            # all is float64 but the frequencies, which the host rounds to float32 here and not there
            np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("float32", "logits"))
            compared += 1
    assert compared == 20
