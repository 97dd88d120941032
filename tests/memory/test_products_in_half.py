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
from memfit.profiling.workspaces import outside_bytes_of, workspace_bytes

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

# Of a convolution the gradient of its input; the table's part and the runs' is what a counter of tensors sees.
for sizes, groups in (((2, 64, 96, 96, 96, 3), 1), ((1, 32, 160, 160, 32, 5), 1)):
    x = torch.ones(sizes[:4], dtype=dtype)
    weight = torch.ones((sizes[4], sizes[1] // groups, sizes[5], sizes[5]), dtype=dtype)
    gradient = torch.ones((sizes[0], sizes[4], *sizes[2:4]), dtype=dtype)
    side = [sizes[5] // 2] * 2
    func = torch.ops.aten.convolution_backward.default
    args = [gradient, x, weight, None, [1, 1], side, [1, 1], False, [0, 0], groups, [True, False, False]]
    func(*args)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    out = func(*args)
    hidden = status("VmHWM") - before - out[0].nbytes
    known = max(workspace_bytes(func, args, out), 4 * x.nbytes + 4 * gradient.nbytes) + outside_bytes_of(func, args, out)
    rows.append([list(sizes), False, False, hidden, known])
    del out
print(json.dumps(rows))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_product_takes_more_of_the_process_than_the_table_says(dtype: str) -> None:
    # Each larger piece by itself, and given back at once: else what was freed before would be taken again.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 << 10), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURES, dtype], env=variables, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows) == 18
    assert not [row for row in rows if row[3] > row[4] + (1 << 20)]
    # Where much is counted of a product, it is there.
    assert not [row for row in rows[:16] if row[4] > (8 << 20) and row[3] < 0.8 * row[4]]
