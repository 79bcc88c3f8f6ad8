"""Compiling a step: what its cached result depends on; the compiler is replaced."""

from xla_attention.planner import compile as planner_compile
from xla_attention.planner.topology import parse_topology

ANSWER = {"seconds": 1.0, "argument_bytes": 4, "output_bytes": 3, "temp_bytes": 2, "alias_bytes": 1}


def test_a_mesh_for_auto_sharding_is_another_compilation(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_ATTENTION_CACHE", str(tmp_path))
    asked = []

    def run(module, topology, devices, flags, hlo, *auto):
        asked.append(auto)
        return ANSWER | {"places": []}

    monkeypatch.setattr(planner_compile, "_run_worker", run)
    slice_ = parse_topology("v5e:2x2")
    for auto_mesh in ((), (1, 4), (), (1, 4), (2, 2)):
        step = planner_compile.compile_step(b"module", slice_, auto_mesh=auto_mesh)
        assert step.compiled.peak_bytes == 8
    assert asked == [(), ("[1, 4]",), ("[2, 2]",)]
