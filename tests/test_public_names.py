"""Every public name of the package leads to something: they are resolved on first use, by name."""

import pytest

import xla_attention
from xla_attention import ops


@pytest.mark.parametrize("name", sorted({*xla_attention.__all__, *ops.__all__}))
def test_name_resolves(name):
    assert getattr(xla_attention, name) is not None
