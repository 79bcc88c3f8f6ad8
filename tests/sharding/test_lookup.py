"""Lookups in a sharded table are lookups in the whole one, and so are their gradients."""

import pytest
from spmd import run_spmd

from xla_attention.sharding.lookup import lookup_of
from xla_attention.sharding.mesh import AXES, MeshConfig

# The table's axes, rows and columns, on a mesh; what is looked up lies as batches do.
CASES = {
    "fsdp": ({"fsdp": 8}, [[], ["fsdp"]]),
    "hsdp": ({"data": 2, "fsdp": 4}, [[], ["fsdp"]]),
    "2d": ({"fsdp": 4, "tensor": 2}, [["tensor"], ["fsdp"]]),
    "context": ({"fsdp": 2, "context": 4}, [[], ["fsdp", "context"]]),
    "context first": ({"fsdp": 4, "context": 2}, [[], ["context", "fsdp"]]),
    "columns over tensor too": ({"data": 2, "fsdp": 2, "tensor": 2}, [[], ["fsdp", "tensor"]]),
    "three axes": ({"data": 2, "fsdp": 2, "context": 2}, [[], ["context"]]),
    "whole": ({"fsdp": 8}, [[], []]),
}
LOOK_UP = """
import torch, torch_xla
import torch.nn.functional as F
import torch_xla.runtime as xr
from xla_attention.sharding.annotate import mark
from xla_attention.sharding.lookup import look_up_sharded, lookup_of
from xla_attention.sharding.mesh import AXES, MeshConfig, build_mesh

xr.use_spmd()
device, found = torch_xla.device(), {}
torch.manual_seed(0)
ids = torch.randint(0, 16, (8, 16))
weights = torch.randn(8, 16, 32)
for name, (sizes, table) in VARIABLES["cases"].items():
    mesh = build_mesh(MeshConfig(**sizes))
    all_sizes = dict(zip(AXES, mesh.mesh_shape))
    table = tuple(map(tuple, table))
    output = (("data", "fsdp"), ("context",), ())
    whole = torch.nn.Embedding(16, 32)
    sharded = torch.nn.Embedding.from_pretrained(whole.weight.detach().to(device), freeze=False)
    mark(sharded.weight, mesh, table)
    look_up_sharded(sharded, lookup_of(mesh, all_sizes, table, output, 16))
    on_device = ids.to(device)
    mark(on_device, mesh, output[:2])
    want, got = whole(ids), sharded(on_device)
    (want * weights).sum().backward()
    (got * weights.to(device)).sum().backward()
    torch_xla.sync()
    assert torch.equal(got.detach().cpu(), want.detach()), name
    found[name] = (sharded.weight.grad.cpu() - whole.weight.grad).abs().max().item()
print(json.dumps(found))
"""


def test_rows_are_equal_and_gradients_to_rounding():
    """Rows bit for bit; a gradient adds up about 8 float32 of size 1, in another order."""
    errors = run_spmd(LOOK_UP, 8, cases=CASES)
    assert errors.keys() == CASES.keys() and max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("table", "output"),
    [
        ((("fsdp",), ()), (("fsdp",), (), ())),  # rows cut over an axis of the batch
        (((), ("data", "fsdp")), (("data", "fsdp"), (), ())),  # two of one dimension
        (((), ("data",)), (("data", "fsdp"), (), ())),  # not the last of its dimension
        (((), ("fsdp",)), (("data",), (), ("fsdp",))),  # what is looked up is cut over columns
    ],
)
def test_what_has_no_lookup_of_its_own_is_left_to_xla(table, output):
    sizes = MeshConfig(data=2, fsdp=4).sizes(8)
    assert tuple(sizes) == AXES
    assert lookup_of(None, sizes, table, output, 16) is None
