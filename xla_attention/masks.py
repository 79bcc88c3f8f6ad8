"""Masks for `flash_attention(mask=...)`: lazy values that compose with ``&``, ``|`` and ``~``."""

from pallas_kernels.masks import Causal, Chunked, Full, KeyLength, Mask, PerHead, SlidingWindow, prefix_lm

__all__ = ["Causal", "Chunked", "Full", "KeyLength", "Mask", "PerHead", "SlidingWindow", "prefix_lm"]
