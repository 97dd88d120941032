"""Touches a weight that is away in every way a person might, each in its own process; a child of test_errors_away.py.

In: a directory for disk homes as the only argument. Out: one JSON object on stdout: for each touch how its process
ended (`status` 0 or minus a signal), the kind of error it met and its message. A touch that would crash the interpreter
shows as a signal, not as a lost suite.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit
from equivalence import plans, small_models, zoo
from equivalence.plain import adamw
from equivalence.with_memfit import fit_with, profile_of

TOUCHED = "blocks.1.mix.up.weight"


def _numpy(weight: torch.Tensor, _model: nn.Module) -> object:
    return weight.detach().numpy().sum()


def _save(_weight: torch.Tensor, model: nn.Module) -> object:
    return torch.save(model.state_dict(), io.BytesIO())


def _no_grad_in_place(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor, nn.Module], object]:
    def touch(weight: torch.Tensor, _model: nn.Module) -> object:
        with torch.no_grad():
            return change(weight)

    return touch


TOUCHES: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "print": lambda weight, _: print(weight, file=io.StringIO()),
    "repr": lambda weight, _: repr(weight),
    "add": lambda weight, _: weight + 1,
    "sum": lambda weight, _: weight.sum(),
    "clone": lambda weight, _: weight.clone(),
    "detach-clone": lambda weight, _: weight.detach().clone(),
    "data-add": lambda weight, _: weight.data + 1,
    "norm": lambda weight, _: torch.linalg.vector_norm(weight),
    "index": lambda weight, _: float(weight[0, 0]),
    "item": lambda weight, _: weight.view(-1)[3].item(),
    "tolist": lambda weight, _: weight.tolist(),
    "numpy": _numpy,
    "equal": lambda weight, _: torch.equal(weight, torch.zeros_like(weight)),
    "matmul": lambda weight, _: weight @ weight.T,
    "to-float64": lambda weight, _: weight.to(torch.float64),
    "copy_": _no_grad_in_place(lambda weight: weight.copy_(torch.zeros(weight.shape))),
    "copy-from": _no_grad_in_place(lambda weight: torch.zeros(weight.shape).copy_(weight)),
    "zero_": _no_grad_in_place(lambda weight: weight.zero_()),
    "mul_": _no_grad_in_place(lambda weight: weight.mul_(2.0)),
    "average": _no_grad_in_place(lambda weight: torch.zeros(weight.shape).lerp_(weight, 0.1)),
    "normal_": lambda weight, _: nn.init.normal_(weight),
    "foreach": _no_grad_in_place(lambda weight: torch._foreach_add([weight], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    ),
    "state_dict": lambda _, model: {name: tensor + 0 for name, tensor in model.state_dict().items()},
    "load_state_dict": lambda weight, model: model.load_state_dict(
        {TOUCHED: torch.zeros(weight.shape)}, strict=False
    ),
    "deepcopy-weight": lambda weight, _: copy.deepcopy(weight),
    "deepcopy-model": lambda _, model: copy.deepcopy(model),
    "pickle": lambda weight, _: pickle.dumps(weight),
    "torch.save": _save,
    "parameters_to_vector": lambda _, model: nn.utils.parameters_to_vector(model.parameters()),
}  # fmt: skip

HARMLESS: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "shape": lambda weight, _: (weight.shape, weight.dtype, weight.numel(), weight.device, weight.stride()),
    "count": lambda _, model: sum(p.numel() for p in model.parameters()),
    "names": lambda _, model: [name for name, _ in model.named_parameters()],
    "repr-model": lambda _, model: repr(model),
    "zero_grad": lambda _, model: model.zero_grad(),
}


def _in_a_process_of_its_own(touch: Callable[[torch.Tensor, Any], object], model: nn.Module) -> dict[str, object]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            touch(model.get_parameter(TOUCHED), model)
            report = {"error": None, "message": ""}
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the result
            kinds = [kind.__name__ for kind in type(error).__mro__]
            report = {"error": kinds[0], "is_away_error": "AwayError" in kinds, "message": str(error)}
            report["traceback"] = "".join(traceback.format_exception(error)[-3:])
        os.write(write_end, json.dumps(report).encode())
        # Not sys.exit: the job's threads and files belong to the parent.
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return {"status": os.waitstatus_to_exitcode(status), **(json.loads(text) if text else {})}


def main() -> None:
    """Trains one step, then touches."""
    torch.set_num_threads(1)  # a forked child cannot use its parent's OpenMP threads
    case = zoo.ZOO["kwargs"]()
    assert isinstance(case.model, small_models.Stack)
    plan = plans.BY_NAME["disk"].plan(profile_of(case))
    job = fit_with(plan, Path(sys.argv[1]))(case, adamw()(case.model))
    job.step(case.batch(0))
    touches = {**TOUCHES, **HARMLESS}
    results = {name: _in_a_process_of_its_own(touch, case.model) for name, touch in touches.items()}
    with job.weights():
        results["inside job.weights()"] = _in_a_process_of_its_own(lambda weight, _: weight + 1, case.model)
    results["behind job.weights()"] = _in_a_process_of_its_own(lambda weight, _: weight + 1, case.model)
    job.close()
    results["closed"] = _in_a_process_of_its_own(lambda weight, _: weight + 1, case.model)
    print(json.dumps(results))


if __name__ == "__main__":
    assert memfit is not None
    main()
