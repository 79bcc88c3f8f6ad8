"""Sharding: a mesh, strategies as data, and their annotations on models, optimizers and batches."""
