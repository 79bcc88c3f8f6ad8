"""Attention kernels for TPU in JAX Pallas. Pure JAX: nothing here imports torch."""
