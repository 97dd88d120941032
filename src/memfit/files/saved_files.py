"""The files of a save: what each holds, and where its bytes are.

In: a model, its blocks and states, resting wherever they do. Out: `SaveFile`s, ready to be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memfit import devices
from memfit.core.errors import UnsupportedError
from memfit.files.names import keep_names, shard
from memfit.files.tensor_bytes import HomeSource, JoinedSource, ResidentSource, TensorSource
from memfit.homes.optimizer_states import BlockStates, DecodedState
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.huggingface.conversions import FileTensor, file_tensors
from memfit.tensors.container import Header, TensorSpec, lay_out
from memfit.tensors.trees import typed_view

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
