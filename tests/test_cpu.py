"""cpu.py: exact products, and memory that stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cpu


@pytest.fixture
def switch():
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if switch is None or not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    before = switch.fp32_precision
    yield switch
    switch.fp32_precision = before


def test_fast_products_keep_the_accuracy_of_fp32(switch):
    before = switch.fp32_precision
    on = cpu.fast_cpu_matmul()
    assert on in (True, False) and switch.fp32_precision == ("bf16" if on else before)
    torch.manual_seed(0)
    for rows, inner, columns in ((1, 512, 300), (3, 2048, 64), (130, 768, 257)):
        a, b = torch.randn(rows, inner), torch.randn(columns, inner)
        exact = a.double() @ b.double().T
        for product in (a @ b.T, F.linear(a, b), torch.zeros(rows, columns).addmm_(a, b.T)):
            assert (product - exact).abs().max() < 1e-5 * exact.abs().max()  # bf16 operands: 3e-3


def test_fast_products_stay_off_where_they_would_round(switch, monkeypatch):
    before = switch.fp32_precision
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert cpu.fast_cpu_matmul() is False and switch.fp32_precision == before
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def rounding(a, b):  # a machine whose oneDNN takes the switch's name at its word
        if a.dtype == torch.float32 and switch.fp32_precision == "bf16":
            return torch.matmul(a.bfloat16().float(), b.bfloat16().float())
        return torch.matmul(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    assert cpu.fast_cpu_matmul() is False and switch.fp32_precision == before


PAGES = """
import ctypes, resource, cpu
keeps, libc = cpu.keep_freed_memory() if {keep} else None, ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [libc.malloc(8 << 20) for _ in range(4)]
    [libc.memset(buffer, 1, 8 << 20) for buffer in buffers]
    [libc.free(buffer) for buffer in buffers]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(keeps, [pages() for _ in range(10)][-1])
"""


def pages(keep, **environment):
    """-> what keep_freed_memory said, and page faults of 32 MiB as written and freed nine times before."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", PAGES.format(keep=keep)], env=clean | environment, check=True,
                          capture_output=True, text=True, cwd=Path(cpu.__file__).parent)  # fmt: skip
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="glibc's malloc only")  # fmt: skip
def test_freed_memory_stays_and_costs_no_pages_again():
    said, count = pages(True)
    assert said == "True" and count < 500
    assert pages(False)[1] > 6_000  # of 8,192: what the setting is for
    assert pages(True, MALLOC_MMAP_THRESHOLD_="65536")[0] == "False"  # the environment's own settings win
