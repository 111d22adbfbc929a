"""What lies on devices beside what the memory plan says."""

from __future__ import annotations

from octavo.engine import LLM
from octavo.models.interface import leaves


def assert_planned(llm: LLM) -> None:
    """Bytes of one device of each stage that this process has (torch's rank 0: the last), within 2 %."""
    stages = llm.runner.stages
    for runner, plan in zip(stages, llm.memory_plan.stages[-len(stages) :], strict=True):
        for tree, planned in ((runner.weights, plan.weights_bytes), (runner.cache.groups, plan.cache_bytes)):
            measured = sum(
                x.addressable_shards[0].data.nbytes if hasattr(x, "addressable_shards") else x.nbytes
                for x in leaves(tree)
            )
            assert abs(measured - planned) <= 0.02 * planned
