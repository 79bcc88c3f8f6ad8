"""Text from a model."""

from xla_attention.generation.generate import generate, stream_text
from xla_attention.generation.sampling import Sampling

__all__ = ["Sampling", "generate", "stream_text"]
