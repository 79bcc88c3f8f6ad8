"""Where attention lies on a mesh: what is derived, what is refused, and the order of a zig-zag."""

import numpy as np
import pytest
import torch
import torch_xla.distributed.spmd as xs

from xla_attention import (
    AttentionPlacement,
    flash_attention,
    flex_attention,
    from_zigzag,
    masks,
    to_zigzag,
    use_attention_placement,
)
from xla_attention.ops.placement import current_placement

AXES = (("data", 2), ("fsdp", 2), ("tensor", 4), ("context", 2))


def test_the_usual_names_are_found_on_a_mesh(first_device):
    mesh = xs.Mesh(np.array([0]), (1, 1, 1), ("context", "fsdp", "other"))
    found = AttentionPlacement.of_mesh(mesh)
    assert (found.batch, found.heads, found.sequence) == (("fsdp",), None, "context")
    assert found.axes == (("context", 1), ("fsdp", 1), ("other", 1))


def test_partition_spec_is_that_of_mark_sharding(first_device):
    mesh = xs.Mesh(np.array([0]), (1, 1, 1), ("x", "y", "z"))
    found = AttentionPlacement.of_partition_spec(mesh, (("x", 1), None, "z", None), method="all_to_all")
    assert (found.batch, found.heads, found.sequence, found.method) == (("x", "y"), None, "z", "all_to_all")


@pytest.mark.parametrize("spec", [("x", None, None), (None, None, None, "x"), (None, ("x", "y"), None, None)])
def test_other_partition_specs_are_refused(spec, first_device):
    mesh = xs.Mesh(np.array([0]), (1, 1), ("x", "y"))
    with pytest.raises(ValueError, match="partition_spec"):
        AttentionPlacement.of_partition_spec(mesh, spec)


@pytest.mark.parametrize(
    "how, words",
    [
        ({"batch": ("rows",)}, "'rows' is not in the mesh.*data"),
        ({"batch": ("data",), "heads": "data"}, "'data' is given to two"),
        ({"method": "star"}, "method: got 'star'.*all_to_all"),
        ({"layout": "striped"}, "layout: got 'striped'.*zigzag"),
        ({"device_ids": (0, 1)}, "device_ids"),
    ],
)
def test_placements_that_cannot_be(how, words):
    with pytest.raises(ValueError, match=words):
        AttentionPlacement(AXES, **how)


@pytest.mark.parametrize(
    "placement, arguments, words",
    [
        ({"batch": ("data", "fsdp")}, {}, "q: got batch 2.*data=2, fsdp=2"),
        ({"heads": "tensor"}, {"heads": 6, "kv_heads": 6}, "q: got 6 heads.*tensor=4"),
        ({"heads": "tensor"}, {"heads": 12, "kv_heads": 6}, "k: got 6 heads.*tensor=4"),
        ({"sequence": "context"}, {"length": 63}, "q: got length 63.*'context' into 2"),
        ({"sequence": "context", "layout": "zigzag"}, {"length": 62}, "q: got length 62.*into 4"),
        ({"sequence": "context"}, {"bias": torch.zeros(1, 1, 64, 64)}, "bias: not in a ring.*all_to_all"),
        (
            {"heads": "tensor"},
            {"mask": masks.PerHead([masks.Causal()] * 5 + [masks.Full()] * 3)},
            "mask: .*differ.*tensor=4",
        ),
    ],
)
def test_refused_before_anything_is_traced(placement, arguments, words, first_device):
    length, heads = arguments.pop("length", 64), arguments.pop("heads", 8)
    kv_heads = arguments.pop("kv_heads", heads)
    q, k = (torch.zeros(2, n, length, 16, device=first_device) for n in (heads, kv_heads))
    arguments = {n: x.to(first_device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with (
        use_attention_placement(AttentionPlacement(AXES, **placement)),
        pytest.raises(ValueError, match=words),
    ):
        flash_attention(q, k, k, **arguments)


def test_a_placement_needs_an_spmd_program(first_device):
    q = torch.zeros(4, 4, 16, 16, device=first_device)
    with (
        use_attention_placement(AttentionPlacement(AXES, heads="tensor")),
        pytest.raises(ValueError, match="not an SPMD program.*use_spmd"),
    ):
        flash_attention(q, q, q)


def test_flex_attention_is_refused_where_its_functions_cannot_follow(first_device):
    q = torch.zeros(2, 8, 64, 16, device=first_device)
    table = torch.zeros(64, device=first_device)
    ring = AttentionPlacement(AXES, sequence="context")
    with use_attention_placement(ring), pytest.raises(ValueError, match="score_mod: not in a ring"):
        flex_attention(q, q, q, lambda s, b, h, i, j: s + table[j])
    zigzag = AttentionPlacement(AXES, sequence="context", method="all_to_all", layout="zigzag")
    with use_attention_placement(zigzag), pytest.raises(ValueError, match="zig-zag"):
        flex_attention(q, q, q, lambda s, b, h, i, j: s + table[j])


def test_placements_hold_inside_their_block():
    assert current_placement() is None
    outer = AttentionPlacement(AXES, heads="tensor")
    with use_attention_placement(outer):
        with use_attention_placement(None):
            assert current_placement() is None
        assert current_placement() is outer
    assert current_placement() is None


def test_partition_spec_needs_a_mesh(first_device):
    q = torch.zeros(1, 1, 16, 16, device=first_device)
    with pytest.raises(ValueError, match="mesh: partition_spec is given"):
        flash_attention(q, q, q, partition_spec=(None,) * 4)


def test_zigzag_puts_an_early_and_a_late_chunk_on_each_shard():
    x = torch.arange(16)[None]
    assert to_zigzag(x, 2).tolist() == [[0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]]
    y = torch.randn(3, 24, 2)
    assert torch.equal(from_zigzag(to_zigzag(y, 3, 1), 3, 1), y)
    with pytest.raises(ValueError, match="length 16, must be a multiple of 6"):
        to_zigzag(x, 3)
