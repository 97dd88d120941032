"""Decides which tensors of a model are saved, under which names and in which files.

In: a model, its weights here or away. Out: names and tensors as `state_dict` gives them, each tied
tensor once; shards.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.core.errors import UnsupportedError, UsageError
from memfit.engine.conversions import FileTensor, file_tensors
from memfit.files.tensor_bytes import HomeSource, JoinedSource, ResidentSource, TensorSource
from memfit.files.trainer import OLD_FILE_NAME, is_of_trainer
from memfit.homes.optimizer_states import BlockStates, DecodedState
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.tensors.container import Header, TensorSpec, lay_out
from memfit.tensors.trees import typed_view

STALE = re.compile(
    r"model\.safetensors|model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json|optimizer\.safetensors|registered\.safetensors|averages(-\d+)?\.safetensors|memfit_state\.json"
)
"""Files that a new save replaces even where it has no file of that name."""


def is_stale(path: Path) -> bool:
    """Tests whether a new save replaces a file of an older one, even where it has no file of that
    name.
    """
    is_old_state = path.name == OLD_FILE_NAME and not is_of_trainer(path)
    return is_old_state or STALE.fullmatch(path.name) is not None


_EXTRA_STATE = "_extra_state"
"""As `torch.nn.modules.module` has it."""


@dataclass(frozen=True, kw_only=True)
class KeptNames:
    """The entries of a state dict.

    Attributes:
        tensors: by name, each tensor once; parameters are the model's own objects, whose bytes may
            be away.
        tied: name that was left out -> name that holds the same tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]


def keep_names(model: nn.Module) -> KeptNames:
    """Names as in `model.state_dict()`, ties resolved as transformers does on loading.

    Reads no values of parameters.

    Raises:
        UnsupportedError: an entry that is not a dense tensor (extra state of a module, say).
    """
    # keep_vars gives the parameters themselves; without it each would be detached, which needs its
    # bytes to be here.
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    groups: dict[object, list[str]] = defaultdict(list)
    for name, value in entries.items():
        if name in ignored:
            continue
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise UnsupportedError(
                f"{name!r} of the model's state_dict is {kind}; safetensors holds dense tensors only. Keep it in a buffer, or save it yourself"
            )
        groups[_identity(value)].append(name)
    patterns = _tied_patterns(model)
    chosen = {_choose(names, patterns): names for names in groups.values()}
    return KeptNames(
        tensors={name: entries[name] for name in entries if name in chosen},
        tied={other: name for name, names in chosen.items() for other in names if other != name},
    )


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """By name in the state dict, the modules that have state beside parameters and buffers
    (`get_extra_state`).
    """
    return {
        f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE: module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _identity(tensor: torch.Tensor) -> object:
    """Equal for the same tensor under two names."""
    if isinstance(tensor, nn.Parameter) or tensor.numel() == 0:
        return id(tensor)
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
    )


def _tied_patterns(model: nn.Module) -> list[re.Pattern[str]]:
    """Returns the names that a transformers model fills from others on loading."""
    found: set[str] = set(getattr(model, "all_tied_weights_keys", None) or ())
    for prefix, module in model.named_modules():
        declared = getattr(module, "_tied_weights_keys", None) or ()
        found.update(f"{prefix}.{name}" if prefix else name for name in declared)
    return [re.compile(pattern) for pattern in sorted(found)]


def _choose(names: Sequence[str], patterns: Sequence[re.Pattern[str]]) -> str:
    """The name that stays: the first that is not declared to be filled from another one."""
    return next((n for n in names if not any(p.search(n) for p in patterns)), names[0])


def shard(sizes_bytes: Mapping[str, int], max_shard_bytes: int) -> list[tuple[str, list[str]]]:
    """Cuts tensors into files of at most `max_shard_bytes`, in order.

    A larger tensor has a file of its own.

    Returns:
        (file name, names of its tensors): one `model.safetensors`, or numbered ones as transformers
            names them.

    Raises:
        UsageError: not a positive size.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes_bytes.items():
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        return [("model.safetensors", shards[0])]
    return [(f"model-{i:05d}-of-{len(shards):05d}.safetensors", names) for i, names in enumerate(shards, 1)]


# The files of a save: what each holds, and where its bytes are.
#
# In: a model, its blocks and states, resting wherever they do. Out: `SaveFile`s, ready to be
# written.

OPTIMIZER_NAME = "optimizer.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class SaveFile:
    """A safetensors file to be written: its name, its header, and by tensor name where the bytes
    are.
    """

    name: str
    header: Header
    sources: Mapping[str, TensorSource]


def wait_for_updates(blocks: Sequence[BlockWeights]) -> None:
    """Waits until no block is arriving and, on an accelerator, until all its streams are done."""
    for block in blocks:
        if block.is_here:
            block.wait()
        device = block.slots[0].parameter.device
        if devices.is_accelerator(device):
            # Homes in pinned memory are read by the host below, which no event orders.
            devices.of(device).synchronize(device)


def weight_files(
    model: nn.Module, blocks: Sequence[BlockWeights], max_shard_bytes: int
) -> tuple[list[SaveFile], str | None]:
    """The files of weights, and the text of their index if there are several.

    Raises:
        UsageError, UnsupportedError: see `shard` and `keep_names`.
    """
    kept = keep_names(model)
    placed = {id(slot.parameter): (block, slot) for block in blocks for slot in block.slots}

    def source_of(name: str) -> TensorSource:
        tensor = kept.tensors[name]
        place = placed.get(id(tensor))
        return ResidentSource(tensor) if place is None else weight_source(*place)

    sources: dict[str, TensorSource] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in kept.tensors.items()}
    for name, wanted in file_tensors(model, shapes).items():
        sources[name] = join(name, wanted, source_of)
    return pack_weights(sources, kept.tied, max_shard_bytes, parameters=sum(p.numel() for p in model.parameters()))


def join(name: str, wanted: FileTensor, source_of: Callable[[str], TensorSource]) -> TensorSource:
    """A tensor of the files, out of those of the model.

    Raises:
        UnsupportedError: they have different dtypes.
    """
    parts = [(source_of(part.name), part.first, part.count) for part in wanted.parts]
    dtypes = {str(source.dtype) for source, _, _ in parts}
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"{name!r} of the files is {wanted.parts[0].name!r} and {len(parts) - 1} more, which have {sorted(dtypes)}: give them one dtype"
        )
    return JoinedSource(parts, wanted.shape)


def pack_weights(
    sources: Mapping[str, TensorSource], tied: Mapping[str, str], max_shard_bytes: int, *, parameters: int
) -> tuple[list[SaveFile], str | None]:
    """Files of at most so many bytes, in the order of the tensors, and the text of their index if
    there are several.

    Args:
        sources: by name in the files, each tensor once.
        tied: name that was left out -> name that holds the same tensor.
        max_shard_bytes: of one file.
        parameters: how many numbers the model has, for the index.
    """
    specs = {name: TensorSpec(name=name, dtype=s.dtype, shape=s.shape) for name, s in sources.items()}
    shards = shard({name: spec.nbytes for name, spec in specs.items()}, max_shard_bytes)
    files: list[SaveFile] = []
    for file_name, names in shards:
        chosen = set(names)
        # Names that were left out, each with the one that holds its tensor, as safetensors' own
        # load_model writes and wants them.
        aliases = {other: name for other, name in tied.items() if name in chosen}
        header = lay_out([specs[name] for name in names], {"format": "pt", **aliases})
        files.append(SaveFile(name=file_name, header=header, sources={name: sources[name] for name in names}))
    if len(files) == 1:
        return files, None
    index = {
        "metadata": {
            "total_parameters": parameters,
            "total_size": sum(spec.nbytes for spec in specs.values()),
        },
        "weight_map": {name: file_name for file_name, names in shards for name in sorted(names)},
    }
    return files, json.dumps(index, indent=2, sort_keys=True) + "\n"


def weight_source(block: BlockWeights, slot: ParameterSlot) -> TensorSource:
    """Where the weight is, or its master where it has one."""
    home = block.master_home
    if block.is_here and not block.has_masters:
        return ResidentSource(slot.parameter)
    assert home is not None
    if home.memory is not None:
        return ResidentSource(
            typed_view(home.memory, slot.master_offset_bytes, slot.master_dtype, slot.shape, slot.stride)
        )
    return HomeSource(home, slot.master_offset_bytes, dtype=slot.master_dtype, shape=slot.shape, stride=slot.stride)


def optimizer_file(blocks: Sequence[BlockWeights], states: Mapping[int, BlockStates]) -> SaveFile:
    """The file of all state tensors; it holds none before the first step."""
    sources: dict[str, TensorSource] = {}
    for own, slot in trained_slots(blocks, states):
        whole = own.whole_homes(slot)
        for tensor, home in whole or ():
            is_like = tensor.shape_kind == "like"
            sources[f"{slot.name}.{tensor.key}"] = HomeSource(
                home,
                0,
                dtype=tensor.dtype or torch.float32,
                shape=slot.shape if is_like else tuple(tensor.shape),
                stride=slot.stride if is_like else None,
            )
        for state in () if whole is not None else own.slots[slot.name]:
            assert own.home is not None
            if state.codec is not None:
                decoded = DecodedState(own.home, state)
                source: TensorSource = HomeSource(decoded, 0, dtype=state.dtype, shape=state.shape, stride=slot.stride)
            elif own.home.memory is None:
                source = HomeSource(
                    own.home,
                    state.offset_bytes,
                    dtype=state.dtype,
                    shape=state.shape,
                    stride=slot.stride if state.is_like_weight else None,
                )
            else:
                stride = slot.stride if state.is_like_weight else None
                source = ResidentSource(
                    typed_view(own.home.memory, state.offset_bytes, state.dtype, state.shape, stride)
                )
            sources[f"{slot.name}.{state.key}"] = source
    return pack_states(sources)


def pack_states(sources: Mapping[str, TensorSource]) -> SaveFile:
    """The file of state tensors, as `<parameter>.<key>`."""
    specs = [TensorSpec(name=name, dtype=source.dtype, shape=source.shape) for name, source in sources.items()]
    return SaveFile(name=OPTIMIZER_NAME, header=lay_out(specs, {"format": "pt"}), sources=sources)


def trained_slots(
    blocks: Sequence[BlockWeights], states: Mapping[int, BlockStates]
) -> Iterator[tuple[BlockStates, ParameterSlot]]:
    """Yields for each parameter with states by now: the states of its block, its slot."""
    for block in blocks:
        own = states.get(block.index)
        for slot in block.slots if own is not None else ():
            if own is not None and own.exists(slot.name):
                yield own, slot
