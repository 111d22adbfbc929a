"""The host: who runs next, with which blocks, and what a user sees of it."""

from ..models.logit_edits import LogitsProcessor
from .async_llm import AsyncEngineArgs, AsyncLLM
from .beam_search import BeamSearchParams
from .errors import EngineDeadError, QueueFullError, RequestFailedError
from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestOutput
from .pooling import PoolingParams
from .sampling_params import RequestOutputKind, SamplingParams
from .structured_output_params import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineDeadError",
    "LogitsProcessor",
    "Logprob",
    "PoolingParams",
    "QueueFullError",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
