"""Measurements that commands print."""
