import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are tiny: sharing them between threads costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
