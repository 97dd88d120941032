"""Products in half precision take no more inside than the table says, by the kernel's count of the process.

What a processor without such products takes comes from the C library, where no counter of tensors sees it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_MEASURES = """
import json, re, sys
from pathlib import Path
import torch
from memfit.trace.workspaces import outside_bytes_of, workspace_bytes

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def factor(rows, columns, by_columns, dtype):
    found = torch.ones((columns, rows) if by_columns else (rows, columns), dtype=dtype)
    return found.T if by_columns else found

torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
rows = []
for sizes in ((3000, 8, 3000), (20000, 6, 400)):
    for left in (False, True):
        for right in (False, True):
            a, b = factor(sizes[0], sizes[1], left, dtype), factor(sizes[1], sizes[2], right, dtype)
            for func, args in ((torch.ops.aten.mm.default, [a, b]), (torch.ops.aten.bmm.default, [a[None], b[None]])):
                func(*args)  # what comes once
                Path("/proc/self/clear_refs").write_text("5")
                before = status("VmRSS")
                out = func(*args)
                rows.append([list(sizes), left, right, status("VmHWM") - before - out.nbytes, workspace_bytes(func, args, out) + outside_bytes_of(func, args, out)])
                del out

# Convolutions, with the allocator's own pages taken off: what is left comes from the C library.
from memfit.devices.binding import install
allocator, aten, outside = install(), torch.ops.aten, []

def measure(func, args):
    func(*args)  # afterwards the allocator keeps as many pages as it needs
    mapped = allocator.stats().mapped_bytes
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    out = func(*args)
    hidden = status("VmHWM") - before - (allocator.stats().mapped_bytes - mapped)
    outside.append([str(func), [list(a.shape) for a in args[:3] if a is not None], hidden, outside_bytes_of(func, args, out)])

for threads in (1, 2):
    torch.set_num_threads(threads)
    for x, weight, padding, dilation, stride, is_transposed, groups in (
        ((3, 64, 64, 64), (8, 64, 3, 3), 1, 1, 1, False, 1),
        ((2, 32, 64, 64), (8, 16, 3, 3), 1, 1, 1, False, 2),
        ((2, 32, 64, 64), (8, 32, 3, 3), 2, 2, 1, False, 1),
        ((2, 96, 4000), (8, 96, 5), 2, 1, 1, False, 1),
        ((1, 8, 8, 32, 32), (4, 8, 3, 3, 3), 1, 1, 1, False, 1),
        ((2, 8, 48, 48), (8, 64, 4, 4), 1, 1, 2, True, 1),
    ):
        x, weight, n = torch.ones(x, dtype=dtype), torch.ones(weight, dtype=dtype), len(x) - 2
        more = [[stride] * n, [padding] * n, [dilation] * n, is_transposed, [0] * n, groups]
        measure(aten.convolution.default, [x, weight, None, *more])
        gradient = torch.ones_like(aten.convolution.default(x, weight, None, *more))
        measure(aten.convolution_backward.default, [gradient, x, weight, None, *more, [True, True, False]])
print(json.dumps([rows, outside]))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_product_takes_more_of_the_process_than_the_table_says(dtype: str) -> None:
    # Each larger piece by itself, and given back at once: else what was freed before would be taken again.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 << 10), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURES, dtype], env=variables, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    rows, outside = json.loads(run.stdout.splitlines()[-1])
    assert (len(rows), len(outside)) == (16, 24)
    assert not [row for row in rows if row[3] > row[4] + (1 << 20)]
    # Where much is counted of a product, it is there.
    assert not [row for row in rows if row[4] > (8 << 20) and row[3] < 0.8 * row[4]]
    # Of convolutions the table is an upper bound: some take only the part in fp32, and of groups fewer pictures.
    assert not [row for row in outside if row[2] > row[3] + (2 << 20)]
    assert not [row for row in outside if row[3] > (8 << 20) and row[2] < 0.2 * row[3]]
