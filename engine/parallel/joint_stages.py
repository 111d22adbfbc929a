"""Stages of replicas that step together: experts meet in a stage, over the replicas that it has a part of.

A stage runs one program for all replicas; their hidden rows go on as one array, of which each replica's devices have
their own part.
"""

from __future__ import annotations

from typing import Any

from ..batch import token_input
from .joint_batch import JointPlan, alike_tokens
from .joint_runner import JointRunner
from .pipeline import Earlier, Pipeline, Stage


class JointStage(Stage, JointRunner):
    """A stage that is told JointPlans."""

    def _sampled(self, plan: JointPlan) -> Any:
        tokens = [p.tokens if p else () for p in plan.plans]
        if not any(tokens):
            return ()
        each = [token_input(own, self.shapes, self.scratch) for own in tokens]
        return self.replicas.stack(alike_tokens(each, self.scratch))


class JointEarlier(Earlier, JointStage):
    """One that is not the last, in a process that has them all (JAX)."""


class JointPipeline(Pipeline, JointStage):
    """The last of them."""
