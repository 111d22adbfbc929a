"""The host: who runs next, with which blocks, and what a user sees of it."""

from ..models.logit_edits import LogitsProcessor
from .beam_search import BeamSearchParams
from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestOutput
from .pooling import PoolingParams
from .sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LogitsProcessor",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
