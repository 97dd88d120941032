"""Weights from files, a parameter at a time.

In: a directory as `save_pretrained` or `Job.save` writes it, or what `torch.save` wrote; a model
whose weights may have no bytes. Out: each parameter's values when its block moves in. Shards are
here the files that a save is cut into, not shares of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from memfit.core.closing import ClosesAtExit
from memfit.core.paths import user_path
from memfit.deferred.origin import Origin
from memfit.files.matching import Matched, match
from memfit.files.opening import open_weight_files


class WeightFiles(ClosesAtExit):
    """The files of a model's weights, open. A context manager.

    Names and layout are matched as transformers' `from_pretrained` does, by its own rules: renamed,
    packed and cut tensors, the base model's prefix, tied weights under any of their names
    (`memfit.huggingface.conversions`).

    Memory: the headers; a piece of 2 MiB while a tensor is read; see `Matched.read` for the rare
    layouts that take more.

    Args:
        directory: of files, or one file; see `open_weight_files`.
        model: its parameters may be without bytes.
        origins: of the model; see `Origin`.

    Attributes:
        unused: names in the files that the model has no use for.

    Raises:
        StoreError: the files. UsageError: a tensor of the model is missing, or has another shape.
    """

    def __init__(self, directory: str | Path, model: nn.Module, origins: Sequence[Origin]) -> None:
        self._origins = tuple(origins)
        self._stack = ExitStack()
        source = user_path(directory)
        with ExitStack() as opening:
            files = open_weight_files(source, opening)
            matched, self.unused = match(files, model, source)
            self._parameters: dict[int, Matched] = {}
            self._brought: dict[int, Matched] = {}
            self._buffers: list[Matched] = []
            for found in matched.values():
                if isinstance(found.tensor, nn.Parameter):
                    self._parameters[id(found.tensor)] = found
                else:
                    self._buffers.append(found)
            self._stack = opening.pop_all()

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reads these from the files; the first time, all buffers that are saved as well.

        Raises:
            StoreError: a file cannot be read; may be repeated.
        """
        while self._buffers:
            found = self._buffers[-1]
            found.fill()
            self._buffers.pop()
        for parameter in parameters:
            found = self._parameters.get(id(parameter))
            if found is None:
                continue
            for origin in self._origins:
                origin.make_room(parameter)
            found.read(parameter.data)
            self._brought[id(parameter)] = self._parameters.pop(id(parameter))

    def take_back(self, name: str, parameter: nn.Parameter) -> bool:
        """See `Origin.take_back`: such parameters will be read again."""
        if not any(origin.take_back(name, parameter) for origin in self._origins):
            return False
        found = self._brought.pop(id(parameter), None)
        if found is not None:
            self._parameters[id(parameter)] = found
        return True

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """These got their values elsewhere."""
        chosen = list(parameters)
        for parameter in chosen:
            self._parameters.pop(id(parameter), None)
        for origin in self._origins:
            origin.forget(chosen)

    def close(self) -> None:
        """Closes the files; may be repeated."""
        self._stack.close()
