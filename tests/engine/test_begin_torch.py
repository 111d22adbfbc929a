"""What a start of torch begins beside its import: nothing where no GPU is, and Triton's hash once."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
from backends import BACKENDS

from octavo.engine import begin_torch


def test_a_machine_without_a_driver_starts_none(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert begin_torch.start_driver() is None
    begin_torch.open_context()


@pytest.mark.parametrize("status", [0, 100])
def test_a_context_is_opened_only_by_a_driver_that_starts(status, monkeypatch):
    opened = []
    driver = SimpleNamespace(
        cuInit=lambda flags: status, cuDevicePrimaryCtxRetain=lambda context, gpu: opened.append(gpu)
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begin_torch.open_context()
    assert opened == ([] if status else [0])


@pytest.mark.parametrize("first_gpu", [True, False])
def test_only_the_first_gpu_gets_a_context(first_gpu, monkeypatch):
    begun, both = [], threading.Barrier(3)
    for name in ("open_context", "start_driver", "know_triton"):
        monkeypatch.setattr(begin_torch, name, lambda name=name: (begun.append(name), both.wait(10)))
    begin_torch.begin(first_gpu)
    both.wait(10)
    assert sorted(begun) == sorted(["open_context" if first_gpu else "start_driver", "know_triton"])


@pytest.mark.skipif("torch" not in BACKENDS, reason="Triton's hash is for the torch room")
def test_threads_that_ask_for_tritons_hash_wait_for_one_another(monkeypatch):
    from octavo.kernels_triton import triton_hash

    inside, most = [], []

    def slow():
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr(triton_hash, "triton_key", slow)
    threads = [threading.Thread(target=triton_hash.hash_triton) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
