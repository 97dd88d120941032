"""Finds the blocks of a model (weights that travel together) and the sites where they are called.

In: any `nn.Module`. Out: a `BlockMap` that partitions its parameters. Nothing is run and nothing is
changed.

[Note: how blocks are found]
1. Sites are the members of the outermost ModuleList, Sequential or ModuleDict met on the way down
   from the root: transformer layers, residual stages. A member without parameters does not count. A
   member that alone holds more than half of all parameters and has such containers inside is opened
   instead (a whole backbone in a Sequential), and so is one that cannot be called (a list of
   lists). A model without containers has its children as sites, opened by the same rule of one
   half.
2. What is left belongs to the smallest module that owns it directly: embedding, final norm, head.
   If such a module has sites inside, calling it would visit everything, so its own parameters form
   a *spanning* block: no site, always on the device. If it only has other leftovers inside, they
   merge into it (an embedding with its class token).
3. A module is never opened where its parts do not run by themselves: multi-head attention,
   parametrized modules, adapters that wrap a layer.
4. A tied parameter belongs to the first block that has it; the site of the other use lists that
   block too.
What this cannot see (a member whose weights are read by other code than its own call) is found by
the trace: `refine_blocks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memfit.core.errors import UnsupportedError, UsageError
from memfit.tensors.trees import own_attributes
from memfit.trace.traced_trees import contained_tensors

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_UNCALLABLE = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleSite:
    """A module where hooks are placed; one execution of it is a call.

    Attributes:
        name: dotted name; "" for the model itself.
        module: the module.
        blocks: indices of the blocks that own a parameter in its subtree, its own block first.
        is_repeated: another site of the same class stands in the same container.
    """

    name: str
    module: nn.Module
    blocks: tuple[int, ...]
    is_repeated: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Weights that travel together.

    Attributes:
        name: dotted name of the module that owns them.
        kind: equal for blocks of the same class, names, shapes and dtypes.
        parameters: (dotted name in the model, parameter), each parameter object once, under its
            first name.
        is_spanning: no call brackets its uses: it must stay on the device.
    """

    name: str
    kind: str
    parameters: tuple[tuple[str, nn.Parameter], ...]
    is_spanning: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMap:
    """Blocks partition the parameters of the model; sites refer to blocks by index.

    Attributes:
        blocks: in the order of the model's modules, or in that of a trace's calls.
        sites: modules that may be calls.
        is_arranged: blocks are in the order of a job's sample. A later batch may call others first,
            and keeps that order: schedules name blocks by their index.
    """

    blocks: tuple[Block, ...]
    sites: tuple[ModuleSite, ...]
    is_arranged: bool = False

    def block_of_parameter(self) -> dict[int, int]:
        """Index of the block by `id(parameter)`."""
        return {id(parameter): index for index, block in enumerate(self.blocks) for _, parameter in block.parameters}


def find_blocks(model: nn.Module, overrides: Sequence[str | nn.Module] | None = None) -> BlockMap:
    """Partitions a model's parameters into blocks (see [Note: how blocks are found]).

    Args:
        model: any module; it is not run.
        overrides: names or modules that are to be the sites, in place of the members of containers
            (rule 1).

    Returns:
        Blocks and sites in the order of the model's modules (the trace puts them in the order of
        calls).

    Raises:
        UnsupportedError: a TorchScript module.
        UsageError: a parameter without shape yet (lazy modules), or an override that is unknown,
            given twice, inside another one, not callable, or without parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{name or 'the model'!r} is a TorchScript module, whose weights are outside of Python's reach: use the module that it was scripted from"
            )
    _check_tensors(model)
    tree = _Tree(model)
    if not tree.parameters:
        raise UsageError(f"the model ({type(model).__name__}) has no parameters: there is nothing to place in memory")
    if overrides is not None:
        chosen = {id(tree.modules[name]): False for name in _override_names(tree, overrides)}
    else:
        chosen = dict(_container_sites(tree, model))
        if not chosen and not _is_closed(model):
            chosen = dict.fromkeys(_child_sites(tree, model), False)
    owners, spanning = _leftover_owners(tree, chosen)
    site_ids = {**dict.fromkeys(owners, False), **chosen}
    return _assemble(tree, site_ids, spanning)


def refine_blocks(
    block_map: BlockMap, *, order: Iterable[str], spanning: Iterable[str], reads: Mapping[str, Iterable[str]]
) -> BlockMap:
    """The same map as a trace saw it.

    Args:
        block_map: from `find_blocks`.
        order: block names in the wanted order; all of them.
        spanning: names of all blocks that must stay on the device.
        reads: by site name, names of the blocks whose weights its calls read (added to those of its
            subtree).
    """
    position = {name: index for index, name in enumerate(order)}
    by_name = {block.name: block for block in block_map.blocks}
    assert set(position) == set(by_name), "an order names every block once"
    stays = set(spanning)
    blocks = tuple(replace(by_name[name], is_spanning=name in stays) for name in position)
    old_names = [block.name for block in block_map.blocks]
    sites = []
    for site in block_map.sites:
        names = [*(old_names[index] for index in site.blocks), *reads.get(site.name, ())]
        sites.append(replace(site, blocks=tuple(position[name] for name in dict.fromkeys(names))))
    return BlockMap(blocks=blocks, sites=tuple(sites), is_arranged=True)


def _check_tensors(model: nn.Module) -> None:
    """Raises `UnsupportedError` for parameters and buffers whose values are not the bytes of their
    own storage.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = type(tensor)
        library = kind.__module__.partition(".")[0]
        told = f"{name!r} is a {kind.__name__}" + ("" if library == "torch" else f" of {library}")
        if hasattr(tensor, "device_mesh"):
            raise UnsupportedError(
                f"{told}, of which each process of a mesh has a part (tensor parallel, fully_shard). Ranks of memfit each build the whole model, before it "
                "is divided, and memfit.fit divides it; other meshes are not supported yet"
            )
        if is_traceable_wrapper_subclass(tensor) or _has_own_dispatch(kind):
            raise UnsupportedError(
                f"{told}, a tensor whose values lie in other tensors inside it; memfit moves tensors that own their bytes. For a frozen base in 4 bits take "
                "bitsandbytes' Linear4bit (NF4); for adapters on ordinary weights, fit the model before it is quantized"
            )
        twin = next((key for key, value in vars(tensor).items() if _shares_storage(value, tensor)), None)
        if twin is not None or (library == "bitsandbytes" and tensor.dtype is torch.int8):
            raise UnsupportedError(
                f"{told}, which keeps a second reference to its bytes ({twin or 'CB'!r}): they would stay in memory when the weight goes home. For a frozen base in "
                "few bits take bitsandbytes' Linear4bit (NF4) instead of its 8-bit layers, or ordinary layers"
            )


def _has_own_dispatch(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def _shares_storage(value: object, tensor: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value is not tensor
        and value.layout is torch.strided
        and tensor.layout is torch.strided
        and value.numel() > 0
        and value.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    )


class _Tree:
    """Names and parameter counts of a model, looked up many times by the walks below."""

    def __init__(self, model: nn.Module) -> None:
        # Modules under their first name; parameters under every name, because a tied weight makes a
        # site of its second user too.
        self.modules = dict(model.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        self.parameters: dict[int, tuple[str, nn.Parameter]] = {}
        self._sizes: dict[int, int] = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                raise UsageError(
                    f"parameter {name!r} has no shape yet (a lazy module): run the model once, then profile it"
                )
            self.parameters[id(parameter)] = (name, parameter)
        self.total = sum(parameter.numel() for _, parameter in self.parameters.values())

    def size(self, module: nn.Module) -> int:
        """Elements of the distinct parameters in a module's subtree."""
        if id(module) not in self._sizes:
            self._sizes[id(module)] = sum(parameter.numel() for parameter in module.parameters())
        return self._sizes[id(module)]

    def holds_over_half(self, module: nn.Module) -> bool:
        return 2 * self.size(module) > self.total


def _is_callable(module: nn.Module) -> bool:
    if isinstance(module, _UNCALLABLE):
        return False
    # torch.compile around a module: its forward is the instance's own
    if hasattr(module, "_orig_mod"):
        return _is_callable(module._orig_mod)  # type: ignore[arg-type]
    # ModuleList and ModuleDict, and classes that only group modules, leave `forward` as nn.Module
    # defines it: it raises.
    return type(module).forward is not nn.Module.forward


def _is_closed(module: nn.Module) -> bool:
    """Tells whether the parts of a module do not run by their own calls (rule 3)."""
    if isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
        return True
    if hasattr(module, "_orig_mod"):
        return _is_closed(module._orig_mod)  # type: ignore[arg-type]
    # Adapter libraries (peft) put a wrapper in a layer's place, which holds the layer beside a
    # ModuleDict of adapters.
    wrapped = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
    return isinstance(wrapped, nn.Module)


def _container_sites(tree: _Tree, module: nn.Module) -> Iterator[tuple[int, bool]]:
    """(id of the site, is repeated) by rule 1, below and without `module` itself."""
    if _is_closed(module):
        return
    if not isinstance(module, _CONTAINERS):
        for child in module.children():
            yield from _container_sites(tree, child)
        return
    members = [member for member in module.children() if tree.size(member)]
    for member in members:
        inner = dict(_container_sites(tree, member)) if _may_open(tree, member) else {}
        if inner:
            yield from inner.items()
        elif _is_callable(member):
            yield id(member), sum(type(other) is type(member) for other in members) > 1


def _may_open(tree: _Tree, member: nn.Module) -> bool:
    return not _is_callable(member) or tree.holds_over_half(member)


def _child_sites(tree: _Tree, module: nn.Module) -> Iterator[int]:
    """Sites of a model without containers: children.

    One that holds more than half is opened, if it has parts.
    """
    for child in module.children():
        if not tree.size(child) or not _is_callable(child):
            continue
        has_parts = any(tree.size(part) and _is_callable(part) for part in child.children())
        if has_parts and tree.holds_over_half(child) and not _is_closed(child):
            yield from _child_sites(tree, child)
        else:
            yield id(child)


def _override_names(tree: _Tree, overrides: Sequence[str | nn.Module]) -> list[str]:
    names: list[str] = []
    for override in overrides:
        name = override if isinstance(override, str) else tree.names.get(id(override))
        if name is None or name not in tree.modules:
            told = repr(override) if isinstance(override, str) else f"a {type(override).__name__}"
            raise UsageError(
                f"blocks= names {told}, which is not a module of the model (or is a second name of a shared one)"
            )
        module = tree.modules[name]
        if name in names:
            raise UsageError(f"blocks= names {name!r} twice")
        if not _is_callable(module):
            raise UsageError(
                f"blocks= names {name!r}, a {type(module).__name__} that is never called: name its members instead"
            )
        if not tree.size(module):
            raise UsageError(f"blocks= names {name!r}, which has no parameters")
        names.append(name)
    for outer in names:
        inside = {id(part) for part in tree.modules[outer].modules()} - {id(tree.modules[outer])}
        for inner in names:
            if id(tree.modules[inner]) in inside:
                raise UsageError(f"blocks= names {inner!r}, which lies inside {outer!r}: a call cannot contain another")
    return names


def _leftover_owners(tree: _Tree, chosen: Mapping[int, bool]) -> tuple[list[int], list[int]]:
    """(modules that become sites, modules whose own parameters span) for what no chosen site covers
    (rule 2).
    """
    covered = {id(part) for module in tree.modules.values() if id(module) in chosen for part in module.modules()}
    has_site = {id(module): any(id(part) in chosen for part in module.modules()) for module in tree.modules.values()}
    owners: dict[int, None] = {}
    for name, module in tree.modules.items():
        if id(module) in covered or not any(p is not None for p in module._parameters.values()):
            continue
        owners[id(_callable_owner(tree, name))] = None
    spanning = [owner for owner in owners if has_site[owner]]
    plain = [owner for owner in owners if not has_site[owner]]
    by_id = {id(module): module for module in tree.modules.values()}
    merged = {
        id(part) for owner in plain for part in by_id[owner].modules() if id(part) != owner and id(part) in owners
    }
    return [owner for owner in plain if owner not in merged], spanning


def _callable_owner(tree: _Tree, name: str) -> nn.Module:
    """The nearest module on the way up that is called as a whole (rule 3), or the root."""
    path = name.split(".") if name else []
    prefixes = [".".join(path[:length]) for length in range(len(path) + 1)]
    for prefix in prefixes:
        # A shared module may lie on the way under another name; it is then reached by its first
        # one.
        if prefix in tree.modules and _is_closed(tree.modules[prefix]):
            return tree.modules[prefix]
    for prefix in reversed(prefixes):
        if prefix in tree.modules and _is_callable(tree.modules[prefix]):
            return tree.modules[prefix]
    return tree.modules[""]


def _assemble(tree: _Tree, site_ids: Mapping[int, bool], spanning: Sequence[int]) -> BlockMap:
    blocks: list[Block] = []
    block_of: dict[int, int] = {}
    taken_by_site: dict[int, int] = {}
    # Spanning owners claim after sites: what is tied to a site's weight can travel with that site.
    for claims_direct in (False, True):
        for name, module in tree.modules.items():
            if id(module) not in (spanning if claims_direct else site_ids):
                continue
            source = _direct_parameters(tree, module, site_ids) if claims_direct else module.parameters()
            own = [p for p in source if id(p) not in block_of]
            if own:
                taken_by_site[id(module)] = len(blocks)
                block_of.update(dict.fromkeys(map(id, own), len(blocks)))
                named = tuple(tree.parameters[id(p)] for p in own)
                blocks.append(
                    Block(name=name, kind=_kind(module, name, named), parameters=named, is_spanning=claims_direct)
                )
    assert len(block_of) == len(tree.parameters), "blocks partition the parameters"
    sites = []
    for name, module in tree.modules.items():
        if id(module) in site_ids:
            used = [block_of[id(p)] for p in module.parameters()]
            first = [taken_by_site[id(module)]] if id(module) in taken_by_site else []
            indices = tuple(dict.fromkeys([*first, *used]))
            sites.append(ModuleSite(name=name, module=module, blocks=indices, is_repeated=site_ids[id(module)]))
    return BlockMap(blocks=tuple(blocks), sites=tuple(sites))


def _direct_parameters(tree: _Tree, module: nn.Module, site_ids: Mapping[int, bool]) -> Iterator[nn.Parameter]:
    """Parameters that a spanning module owns: its own and those of uncallable or closed parts that
    no site covers.
    """
    covered = {id(p) for part in tree.modules.values() if id(part) in site_ids for p in part.parameters()}
    own_name = tree.names[id(module)]
    for name, part in tree.modules.items():
        if name == own_name or name.startswith(f"{own_name}." if own_name else ""):
            for parameter in part.parameters(recurse=False):
                if id(parameter) not in covered and _callable_owner(tree, name) is module:
                    yield parameter


def _kind(module: nn.Module, name: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> str:
    prefix = f"{name}." if name else ""
    facts = [
        (full.removeprefix(prefix), tuple(p.shape), str(p.dtype), p.requires_grad, p.device.type)
        for full, p in parameters
    ]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"{type(module).__qualname__}-{digest}"


# Tensors that modules keep on themselves, beside parameters and buffers.
#
# In: a module. Out: the tensors in its own and its submodules' attributes, and in lists and
# dictionaries there.


def kept_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that a call of the module may find there of an earlier one."""
    for owner in module.modules():
        for _, value in own_attributes(owner):
            if isinstance(value, torch.Tensor | list | dict):
                yield from (tensor for tensor in contained_tensors(value) if tensor.layout is torch.strided)
