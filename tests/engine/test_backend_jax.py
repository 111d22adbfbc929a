"""JaxBackend: placing, zeros, programs, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.backend_jax import JaxBackend, device_memory
from octavo.models.interface import ArraySpec

VECTOR = ArraySpec((4096,), (None,))


def _double(rows, x, *, ops):
    return rows["a"] + x, {"a": rows["a"] * 2}


def _program(backend):
    return backend.compile(_double, ("rows", "x"), ("y", "rows"), consumes="rows")


def test_placed_arrays_share_no_memory_with_the_host():
    memory = np.ones(4096 + 16, np.float32)
    # JAX on a CPU keeps memory that is aligned to 64 bytes
    aligned = memory[(-memory.ctypes.data % 64) // 4 :][:4096]
    x = JaxBackend().place(aligned, VECTOR)
    aligned[:] = 7
    assert float(x.sum()) == 4096


def test_place_takes_the_dtype_of_the_spec():
    backend = JaxBackend()
    assert backend.place(np.ones(4096, np.float64), VECTOR).dtype == jnp.float32
    assert backend.place(np.ones(4096, np.int64), ArraySpec((4096,), (None,), "int32")).dtype == jnp.int32


def test_read_is_a_copy():
    backend = JaxBackend()
    x = backend.place(np.ones(4096), VECTOR)
    host = backend.read(x)
    host[:] = 5
    assert float(x.sum()) == 4096
    assert backend.read_tree({"a": [x]})["a"][0].tolist() == [1.0] * 4096


def test_zeros_of_one_shape_are_separate_arrays():
    backend = JaxBackend()
    x, y = backend.zeros(VECTOR), backend.zeros(VECTOR)
    assert not x.any()
    assert x.unsafe_buffer_pointer() != y.unsafe_buffer_pointer()


def test_a_consumed_argument_raises_when_touched():
    backend = JaxBackend()
    old = {"a": backend.place(np.ones(4096), VECTOR)}
    y, new = _program(backend)(old, np.ones(4096, np.float32))
    assert float(y[0]) == 2
    assert float(new["a"][0]) == 2
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old["a"])


def test_a_second_call_compiles_nothing_and_a_new_shape_does():
    backend = JaxBackend()
    run, x = _program(backend), np.ones(4096, np.float32)
    _, rows = run({"a": backend.zeros(VECTOR)}, x)
    before = backend.num_compiles()
    _, rows = run(rows, x)
    assert backend.num_compiles() == before
    run(rows, np.ones(1, np.float32))
    assert backend.num_compiles() == before + 1


def test_precompiled_programs_compile_nothing_when_called():
    backend = JaxBackend()
    run, rows = _program(backend), {"a": backend.place(np.ones(4096), VECTOR)}
    inputs = [np.ones(n, np.float32) for n in (1, 4096)]
    before = backend.num_compiles()
    backend.precompile([(run, (rows, x)) for x in inputs])
    assert backend.num_compiles() == before + 2
    for x in inputs:
        y, rows = run(rows, x)
        assert y.shape == (4096,)
    assert backend.num_compiles() == before + 2
    assert float(rows["a"][0]) == 4


def test_pure_mode_leaves_what_it_was_given():
    backend = JaxBackend(pure=True)
    run, rows = _program(backend), {"a": backend.place(np.ones(4), VECTOR)}
    run(rows, np.ones(4, np.float32))
    assert float(rows["a"][0]) == 1


def test_eager_mode_compiles_no_program_and_consumes_what_it_was_given():
    backend = JaxBackend(eager=True)
    run, rows = _program(backend), {"a": backend.place(np.ones(4), VECTOR)}
    for _ in range(2):
        _, new = run(rows, np.ones(4, np.float32))
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(rows["a"])
        rows = new
    assert float(rows["a"][0]) == 4
    assert not hasattr(run, "lower")


def test_the_next_process_finds_programs_on_disk(tmp_path):
    """Asserts on the second process's hits, and that it compiled nothing else."""
    source = f"""
import numpy as np
from octavo.engine.backend_jax import JaxBackend
from octavo.models.interface import ArraySpec
backend = JaxBackend(cache_dir={str(tmp_path)!r})
run = backend.compile(lambda rows, x, *, ops: (rows + x, rows * 2), ("rows", "x"), ("y", "rows"), consumes="rows")
run(backend.zeros(ArraySpec((64,), (None,))), np.ones(64, np.float32))
print(backend.num_compiles(), backend.num_cache_hits())
"""
    counts = [subprocess.check_output([sys.executable, "-c", source], text=True).split() for _ in range(2)]
    assert counts[0][1] == "0"
    assert counts[1][0] == counts[1][1] == counts[0][0]
    assert int(counts[0][0]) >= 2


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="refused on CPUs only")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_refused_on_a_cpu(dtype):
    with pytest.raises(NotImplementedError, match="float32"):
        JaxBackend(dtype)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="int8"):
        JaxBackend("int8")
    with pytest.raises(ValueError, match="'gspmd' is none of local, shard_map, auto"):
        JaxBackend(mode="gspmd", mesh=jax.make_mesh((1,), ("tp",)))
    with pytest.raises(ValueError, match="'shard_map' needs a mesh"):
        JaxBackend(mode="shard_map")
    with pytest.raises(ValueError, match="'local' takes no mesh"):
        JaxBackend(mesh=jax.make_mesh((1,), ("tp",)))
    with pytest.raises(ValueError, match="'fast' is none of auto, "):
        JaxBackend(attention="fast")


class Gpu:
    """A device as `memory_stats` shows it."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 100, "bytes_in_use": 30}


def test_a_process_asks_its_own_device_and_not_the_first_of_all(monkeypatch):
    """In several processes jax.devices() begins with one of another process."""
    own = jax.devices()[3]
    monkeypatch.setattr(jax, "local_devices", lambda: [own])
    assert JaxBackend().sharding(VECTOR).device_set == {own}
    assert JaxBackend().place(np.ones(4096), VECTOR).devices() == {own}
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    assert device_memory() == 100
    backend = JaxBackend()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (backend.free_memory(), backend.total_memory()) == (70, 100)
