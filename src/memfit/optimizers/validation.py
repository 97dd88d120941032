"""Refuses optimizers that memfit cannot run, before anything runs.

In: the user's optimizer and the model's named parameters. Out: one `Entry` per optimized parameter,
or a clear error.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import UnsupportedError, UsageError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter that the optimizer updates."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    """Index in `optimizer.param_groups`."""
    index: int
    """Index in `optimizer.param_groups[group]["params"]`."""


def validated_entries(optimizer: object, named_parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Entry]:
    """The optimizer's parameters by name, in the order of its groups.

    Args:
        optimizer: what the user gave; need not be an optimizer at all.
        named_parameters: the model's parameters. Tied ones may appear under several names; the
            first name counts.

    Raises:
        UsageError: not an optimizer, a parameter that the model lacks, or one that appears twice.
        UnsupportedError: an optimizer that cannot be run on pieces without changing what it does.
    """
    if isinstance(optimizer, list | tuple) and optimizer and all(isinstance(each, Optimizer) for each in optimizer):
        raise UsageError(
            f"A job has one optimizer, and {len(optimizer)} were given. Fit each network with its own optimizer "
            "(lines=True), and run the loop inside of both `with job.lines():` (docs/lines.md, several optimizers); "
            "or make one optimizer with a parameter group for each."
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"The optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer. Pass the optimizer object "
            "itself, made over the parameters of the model."
        )
    _check_class(optimizer)
    names: dict[int, str] = {}
    for name, parameter in named_parameters.items():
        names.setdefault(id(parameter), name)
    _check_attributes(optimizer, set(names))
    entries: dict[str, Entry] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        _check_group(optimizer, group_index, group)
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise UsageError(_foreign_message(group, group_index, index, parameter))
            if name in entries:
                raise UsageError(
                    f"Parameter {name!r} appears twice in the optimizer: in group {entries[name].group} and in group "
                    f"{group_index}. It would be updated twice a step; remove one of the two."
                )
            _check_parameter(name, parameter)
            entries[name] = Entry(name=name, parameter=parameter, group=group_index, index=index)
    return entries


def _check_class(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam needs sparse gradients, which memfit does not keep. Use sparse=False in the embedding with "
            "Adam or AdamW."
        )
    library = next((c.__module__.partition(".")[0] for c in type(optimizer).__mro__ if _is_of_few_bits(c)), None)
    if library is not None:
        raise UnsupportedError(
            f"{name} of {library} keeps its states in a form of its own (codes with scales, paged memory), for which memfit has no homes. Take the class of "
            "torch.optim that it stands for (AdamW, say) and memfit.fit(allow={'int8-state'}), {'int4-state'} or {'fp8-state'}: then states rest in as few bits"
        )
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    needed = [a.name for a in arguments if a.kind in positional and a.default is inspect.Parameter.empty]
    if isinstance(optimizer, torch.optim.LBFGS) or needed:
        raise UnsupportedError(
            f"{name}.step needs {needed[0] if needed else 'closure'!r}: such an optimizer runs the model several times "
            "within one update, on all parameters at once. memfit makes one update a step; use one whose step() takes no closure, such as AdamW or SGD."
        )
    own_step = vars(optimizer).get("step")
    if own_step is not None and not getattr(own_step, "_wrapped_by_lr_sched", False):
        raise UnsupportedError(
            f"optimizer.step was replaced on this object by {getattr(own_step, '__qualname__', own_step)!r}. memfit "
            f"runs the step of the class {name} and would skip the replacement; override step in a subclass, or use "
            "register_step_pre_hook."
        )


def _check_attributes(optimizer: Optimizer, model_parameters: set[int]) -> None:
    """Refuses an optimizer that holds another one, or the model: it would step on more than the
    piece it is lent.
    """
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state", "defaults"):
            continue
        for item in _shallow_items(value):
            if isinstance(item, Optimizer):
                where = f"optimizer.{attribute}" if item is value else f"in optimizer.{attribute}"
                raise UnsupportedError(
                    f"{type(optimizer).__name__} wraps another optimizer ({type(item).__name__}, {where}). Pass the inner "
                    "optimizer to memfit.fit; a loop under job.lines() may go on with a wrapper that calls its step, as Accelerate's does."
                )
            if isinstance(item, torch.nn.Module) or (isinstance(item, torch.Tensor) and id(item) in model_parameters):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps its own reference to the model's parameters (attribute "
                    f"{attribute!r}); its step could reach weights that are away. memfit can run optimizers that find "
                    "their parameters in param_groups."
                )


def _is_of_few_bits(kind: type) -> bool:
    """Tests for the optimizers of bitsandbytes and torchao, of which a step compiles itself, or
    counts all parameters before it begins.
    """
    return kind.__module__.startswith(("bitsandbytes.optim", "torchao.optim", "torchao.prototype.low_bit_optim"))


def _shallow_items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return (value,)


def _check_group(optimizer: Optimizer, index: int, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    if group.get("differentiable") or optimizer.defaults.get("differentiable"):
        raise UnsupportedError(
            f"{name} has differentiable=True (group {index}): the update itself would be part of an autograd graph "
            "that keeps every weight and state alive. Use differentiable=False."
        )
    if group.get("capturable") and any(not _is_on_accelerator(p) for p in group["params"]):
        raise UnsupportedError(
            f"capturable=True needs parameters on an accelerator; {name} group {index} has some on the CPU. Use capturable=False."
        )


def _is_on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_complex():
        raise UnsupportedError(f"Parameter {name!r} is complex ({parameter.dtype}); memfit keeps real weights only.")
    if parameter.layout is not torch.strided:
        raise UnsupportedError(f"Parameter {name!r} has layout {parameter.layout}; memfit keeps dense weights only.")


def _foreign_message(group: Mapping[str, Any], group_index: int, index: int, parameter: torch.Tensor) -> str:
    given = group.get("param_names")
    called = f" ({given[index]!r})" if given else ""
    return (
        f"Parameter {index} of group {group_index}{called} of the optimizer, of shape {tuple(parameter.shape)}, is not "
        "a parameter of the model. Was the model changed (resized embeddings, replaced layers) after the optimizer "
        "was made? Make the optimizer last. A loss with parameters of its own goes into one module with the model, which is what fit is given."
    )


# Into how small a part an optimizer's step may be cut, and what is known about torch's own classes.
#
# In: an optimizer class. Out: its `Verdict`, if it is one of torch's own (a documented table, of
# which a test checks every entry against the detector in `detect.py`); classes that are not in the
# table are tried out by that detector.

ALIGNED_PIECE_ELEMENTS = 64
"""Elements in a multiple of which pieces begin.

Fused CPU kernels round a vector's body and its tail differently (measured: SGD), and torch itself
cuts them between threads at cache lines. Pieces that start at multiples of this many elements meet
body and tail where the whole tensor does.
"""


class UpdateKind(enum.Enum):
    """The smallest part of the model on which one step of an optimizer is exactly the step on the
    whole.

    In memory: `ELEMENTWISE` needs one piece of weight, gradient and states at a time;
    `PER_PARAMETER` needs one whole parameter with its shape; `JOINT` needs every parameter,
    gradient and state of the optimizer at once.
    """

    ELEMENTWISE = "elementwise"
    PER_PARAMETER = "per parameter"
    JOINT = "joint"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Smallest unit of an update, for one parameter group."""

    kind: UpdateKind
    piece_multiple: int
    """Pieces of an elementwise update hold a multiple of this many elements, except the last one of
    a parameter.
    """
    reason: str
    """One sentence, for error messages."""


# Source: torch/optim/*.py of 2.11 and 2.13. Each of these touches element i of the weight, the
# gradient and the states only with element i, and otherwise with scalars that depend on the step
# count and the group alone.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# Adafactor takes norms of one parameter and factors its second moment into rows and columns; Muon
# orthogonalizes one matrix.
_PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)


SIXTEEN_BIT = frozenset({torch.float16, torch.bfloat16})


def narrowed(verdict: Verdict, dtype: torch.dtype, device_type: str) -> Verdict:
    """The verdict for weights that are updated in this dtype on this kind of device.

    [Note: 16-bit tails] On the CPU, torch's 16-bit `add(alpha=...)` computes in float32 inside full
    vectors and rounds the product to 16 bits in the tail behind the last one (measured on 2.13).
    Tails lie at the end of each thread's share of the tensor, so a plain step on a large 16-bit
    weight depends on the number of threads, and only the whole tensor meets its tails where plain
    torch does.
    """
    if verdict.kind is UpdateKind.ELEMENTWISE and device_type == "cpu" and dtype in SIXTEEN_BIT:
        return Verdict(
            kind=UpdateKind.PER_PARAMETER,
            piece_multiple=1,
            reason=f"{dtype} kernels on the CPU round differently at vector tails; a float32 master may be cut",
        )
    return verdict


def known_classes() -> dict[type[torch.optim.Optimizer], UpdateKind]:
    """The table of torch's own optimizers.

    Subclasses are not covered by it: a subclass may change anything.
    """
    table = dict.fromkeys(_ELEMENTWISE, UpdateKind.ELEMENTWISE)
    table.update(dict.fromkeys(_PER_PARAMETER, UpdateKind.PER_PARAMETER))
    return table


def known_verdict(optimizer_class: type, group: dict[str, Any]) -> Verdict | None:
    """Looks one group of an optimizer of exactly this class up in the table; None if the class is
    not in the table.
    """
    kind = known_classes().get(optimizer_class)
    if kind is None:
        return None
    multiple = ALIGNED_PIECE_ELEMENTS if group.get("fused") and kind is UpdateKind.ELEMENTWISE else 1
    return Verdict(kind=kind, piece_multiple=multiple, reason=f"torch.optim.{optimizer_class.__name__} is {kind.value}")
