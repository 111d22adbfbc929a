"""Cache layouts by name. A new one is a file here and a line in the table."""

from .fp8 import Fp8
from .h2o import H2O
from .kivi import Kivi
from .narrow import Fp8PerTokenHead, Int8
from .paged import HeadMajor, TokenMajor
from .snapkv import SnapKV
from .streaming import StreamingLLM
from .transposed import KTransposed

LAYOUTS = {
    "token_major": TokenMajor,
    "head_major": HeadMajor,
    "k_transposed": KTransposed,
    "int8": Int8,
    "fp8": Fp8,
    "fp8_per_token_head": Fp8PerTokenHead,
    "kivi": Kivi,
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
}
