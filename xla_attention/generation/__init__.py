"""Text from a model: one, or many at once."""

from xla_attention.generation.engine import Counts, Engine
from xla_attention.generation.generate import generate
from xla_attention.generation.request import Completion, Output, Request
from xla_attention.generation.sampling import GREEDY, Sampling
from xla_attention.generation.text import stream_text

__all__ = [
    "GREEDY",
    "Completion",
    "Counts",
    "Engine",
    "Output",
    "Request",
    "Sampling",
    "generate",
    "stream_text",
]
