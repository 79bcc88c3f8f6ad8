"""Both ways of the operator: its kernels on the XLA device, and its definition in eager torch."""

import pytest
import torch


@pytest.fixture(params=["xla", "eager"])
def device(request, first_device):
    return first_device if request.param == "xla" else torch.device("cpu")
