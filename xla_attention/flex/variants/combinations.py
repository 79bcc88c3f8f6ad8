"""Variants combined: masks with and_masks and or_masks, score functions by calling one in another."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from xla_attention.flex.variants import alibi, documents, relative_position, softcap, tanh_gated
from xla_attention.flex.variants.causal import causal
from xla_attention.flex.variants.sliding_window import sliding_window
from xla_attention.flex.variants.variant import Problem, Variant


def composed(*score_mods: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A score_mod that applies others, the first first."""

    def in_turn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return in_turn


def gemma_2(problem: Problem) -> Variant:
    """The local layers of Gemma 2: soft-capping in a sliding window."""
    return Variant(softcap.softcap(1.5), sliding_window(max(problem.q_len // 4, 1)))


def packed_alibi(problem: Problem) -> Variant:
    """ALiBi over packed documents."""
    packed = documents.example(problem)
    return Variant(alibi.alibi(problem.heads), packed.mask_mod)


def packed_window(problem: Problem) -> Variant:
    """Documents in a sliding window, as in training Mistral on packed sequences."""
    ids = documents.document_ids(max(problem.q_len, problem.kv_len), problem.device)
    window = sliding_window(max(problem.q_len // 4, 1))
    return Variant(mask_mod=and_masks(documents.documents(ids), window))


def sinks_and_window(problem: Problem) -> Variant:
    """The first keys beside a sliding window (StreamingLLM, arXiv:2309.17453)."""

    def first_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < 4

    window = sliding_window(max(problem.q_len // 4, 1))
    return Variant(mask_mod=and_masks(causal, or_masks(first_keys, window)))


def heads_apart(problem: Problem) -> Variant:
    """Half of the heads in a sliding window, the others causal."""
    window, half = sliding_window(max(problem.q_len // 4, 1)), problem.heads // 2

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((h >= half) & causal(b, h, q_idx, kv_idx)) | window(b, h, q_idx, kv_idx)

    return Variant(mask_mod=mask)


def gated_relative_softcap(problem: Problem) -> Variant:
    """Three score functions, one after the other, causal."""
    gates, table = tanh_gated.example(problem), relative_position.example(problem)
    score_mod = composed(gates.score_mod, table.score_mod, softcap.softcap(1.5))
    return Variant(score_mod, causal, gates.learned + table.learned)
