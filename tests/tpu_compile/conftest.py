import pytest

from xla_attention.planner import compile as planner


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def runs(monkeypatch):
    """One entry for each time that the compiler really ran."""
    calls, run = [], planner._run_worker
    monkeypatch.setattr(planner, "_run_worker", lambda *a: calls.append(a) or run(*a))
    return calls
