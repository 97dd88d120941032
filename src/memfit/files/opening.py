"""The files of a model's weights, whichever library wrote them.

In: a directory, or one file. Out: open files with the names and places of their tensors.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.files.checkpoint import CheckpointFile
from memfit.files.index import weight_file_names
from memfit.files.reader import TensorFile

_SAFETENSORS = re.compile(r"[\w.-]+\.safetensors")
_CHECKPOINTS = re.compile(r"[\w.-]+\.(bin|pt|pth)")
_CHECKPOINT_NAME = "pytorch_model.bin"


def open_weight_files(source: Path, stack: ExitStack) -> list[TensorFile]:
    """Opens safetensors files, or what `torch.save` wrote: one file, or a directory with
    `model.safetensors` or `pytorch_model.bin`, or the index of their shards.

    Args:
        source: the directory or the file.
        stack: closes the files.

    Raises:
        StoreError: there is none, or a file cannot be read. UsageError: a file has no state dict.
    """
    if source.is_dir():
        has_other = any((source / f"{_CHECKPOINT_NAME}{end}").exists() for end in ("", ".index.json"))
        has_safe = any((source / f"model.safetensors{end}").exists() for end in ("", ".index.json"))
        if has_other and not has_safe:
            names = weight_file_names(source, _CHECKPOINTS, single=_CHECKPOINT_NAME)
            return [stack.enter_context(CheckpointFile(source / name)) for name in names]
        return [stack.enter_context(TensorFile(source / name)) for name in weight_file_names(source, _SAFETENSORS)]
    if not source.exists():
        raise StoreError(
            f"{source} does not exist: name a directory with model.safetensors, pytorch_model.bin or their shards, or one such file"
        )
    kind = TensorFile if source.suffix == ".safetensors" else CheckpointFile
    return [stack.enter_context(kind(source))]
