"""Full attention: every query sees every key (Vaswani et al., arXiv:1706.03762)."""

from xla_attention.flex.variants.variant import Problem, Variant


def example(problem: Problem) -> Variant:
    """No function at all."""
    return Variant()
