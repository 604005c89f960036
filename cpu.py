"""What a run on a CPU switches on for its whole process, once, at its start: a matmul route, and how memory is kept.

Neither changes a result beyond fp32's rounding. torch's own defaults are slower here for reasons that have nothing to
do with the algorithm, so train.py and sample.py call both functions, and bench.py runs peers without them.

Try it:  python -c "import cpu; print(cpu.fast_cpu_matmul(), cpu.keep_freed_memory())"
"""

from __future__ import annotations

import ctypes
import os

import torch


def fast_cpu_matmul() -> bool:
    """Sends fp32 products on the CPU to oneDNN where that is exact. True where it is now on.

    torch's default (MKL) takes a slow path on AMD. The setting's name says bf16, but without AMX oneDNN has no bf16
    unit to use and computes in true fp32, 1.5 to 2.3 times as fast; with AMX it would really round. So it stays on only
    where there is no AMX and a product checked against float64 keeps fp32's accuracy.
    """
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if not torch.backends.mkldnn.is_available() or not hasattr(switch, "fp32_precision"):
        return False
    if torch.cpu._is_amx_tile_supported():
        return False
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 1024, generator=generator), torch.randn(1024, 256, generator=generator)
    exact = a.double() @ b.double()
    if ((a @ b - exact).abs().max() / exact.abs().max()).item() < 3e-6:  # fp32 errs by 4e-7 here, bf16 by 3e-3
        return True
    switch.fp32_precision = before
    return False


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Memory of freed tensors, up to 32 MiB each and 512 MiB together, stays with the process. True where it now does.

    glibc hands it back to the system as soon as some of it lies together, and the next tensors wait while the system
    clears their pages: a fifth of a decode step with large logits. Left alone with another malloc, or where the
    environment has settings of its own (MALLOC_TRIM_THRESHOLD_ and its like).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 32 << 20) and mallopt(M_TRIM_THRESHOLD, 512 << 20))  # 32 MiB: its maximum
