"""Cases of `predictions.py` drawn from a seed: a model, its batch, an optimizer, a precision, and a
plan.

In: a seed and a number. Out: a `Case`, which JSON says in full: whoever has it needs no draw.

A plan is one of three kinds. "planner": the planner is given a limit between a third of what plain
training takes and all of it. "chance": a home is drawn for each block's weights, gradients and
states, a fate for each call, order, tail, time of updates. "plain": everything stays, as plain
PyTorch has it. So that errors are not lost in what an interpreter takes, rows are added to the
batch until the predicted peak of tensors is `LEAST_BYTES`; a peak that is measured below that all
the same is shown by the report.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    import memfit
    from memfit.core.plan import Plan

LEAST_BYTES = 320 * common.MIB
MOST_ROWS = 256
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-3}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    ("Adafactor", {"lr": 1e-2}),
    ("Lion", {"lr": 1e-4}),
)
PRECISIONS = ("fp32", "autocast", "bf16", "bf16 split", "int8 states")
"""Precisions of the weights and what is computed; the last: of the optimizer's states."""
_KINDS = ("planner", "chance", "planner", "chance", "plain", "chance", "planner", "chance")
_ALLOWED = {"bf16": ("bf16",), "bf16 split": ("bf16",), "int8 states": ("int8-state",)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, as JSON says it.

    Attributes:
        number: of the seed.
        architecture: a key of `families.ARCHITECTURES`.
        family, config, batch, sizes: as `limiting.building` takes them; sizes begin with the rows.
        optimizer: a class of torch.optim (or Lion), and its settings.
        precision: one of `PRECISIONS`.
        clip: the norm to which gradients are clipped; None: they are not.
        kind: of its plan.
        limit_bytes: of the process, for the planner; None: it is not asked.
        plan: given; None: the planner decides.
    """

    number: int
    architecture: str
    family: tuple[str, str]
    config: dict[str, Any]
    batch: str
    sizes: tuple[int, int, int]
    optimizer: tuple[str, dict[str, Any]]
    precision: str
    clip: float | None
    kind: str
    limit_bytes: int | None = None
    plan: dict[str, Any] | None = None

    @classmethod
    def read(cls, found: dict[str, Any]) -> Case:
        """Reads what `asdict` made, after JSON."""
        parts = {name: tuple(found[name]) for name in ("family", "sizes", "optimizer")}
        return cls(**{**found, **parts})

    @property
    def name(self) -> str:
        """For tables."""
        model = self.config["kind"] if self.family[0] == "torch" else self.family[0].removesuffix("Config")
        return f"{self.number} {model}"

    @property
    def allow(self) -> set[str]:
        """As `memfit.fit` takes it."""
        return {"nonadditive-loss", *_ALLOWED.get(self.precision, ())}


def draw(seed: int, number: int) -> Case:
    """The case of that number, but for its plan and the rows that this asks for."""
    from predicting.families import ARCHITECTURES

    rng = random.Random(f"predictions {seed}/{number}")
    architecture = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
    family, config, batch, sizes = rng.choice(ARCHITECTURES[architecture])(rng)
    optimizer = rng.choice(OPTIMIZERS)
    precision = rng.choices(PRECISIONS, weights=(50, 12, 15, 10, 13))[0]
    if precision == "int8 states" and optimizer[0] == "Adafactor":
        precision = "fp32"  # its states are rows and columns, which stay as they are
    if architecture == "convolution":
        precision = "autocast" if precision == "autocast" else "fp32"
    return Case(
        number=number,
        architecture=architecture,
        family=family,
        config=config,
        batch=batch,
        sizes=sizes,
        optimizer=optimizer,
        precision=precision,
        clip=rng.choice((None, None, None, 1.0)),
        kind=_KINDS[number % len(_KINDS)],
    )


def decided(seed: int, case: Case, resident_bytes: int) -> Case | str:
    """The case with its plan or limit, and rows enough; or why there is none, in words.

    Args:
        seed: of all cases.
        case: as drawn.
        resident_bytes: what a process holds that has imported everything.
    """
    for _ in range(6):
        rng = random.Random(f"plan {seed}/{case.number}")
        found, peak = _planned(rng, case, resident_bytes)
        if isinstance(found, str) or peak >= LEAST_BYTES:
            return found
        rows = min(MOST_ROWS, max(case.sizes[0] + 1, int(case.sizes[0] * min(3.0, 1.1 * LEAST_BYTES / max(peak, 1)))))
        if rows <= case.sizes[0]:
            break
        case = replace(case, sizes=(rows, *case.sizes[1:]))
    return "its peak stays small"


def _planned(rng: random.Random, case: Case, resident_bytes: int) -> tuple[Case | str, int]:
    """A plan for these rows, and the predicted peak of its tensors."""
    import memfit
    from memfit.core.plan import Plan
    from memfit.core.storage_formats import ComputeDtype, StateFormat
    from predicting.measuring import build
    from sweeping.drawing import draw_plan, relaxed

    parts = build(case)
    precision: dict[str, Any] = {}
    if case.precision.startswith("bf16"):
        precision = {"compute_dtype": ComputeDtype.BFLOAT16, "splits_masters": case.precision.endswith("split")}
    if case.precision == "int8 states":
        precision = {"state_format": StateFormat("int8")}
    microbatches = min(rng.choice((1, 1, 2, 3, 4)), case.sizes[0])
    profile = memfit.profile(*parts, microbatches=[1, microbatches])
    # Else it lies beside the model of the job, which a limit would count.
    del parts
    gc.collect()
    if case.kind == "planner":
        return _below_limit(rng, case, profile, resident_bytes)
    plans = [Plan(**precision)]
    if case.kind == "chance":
        drawn = draw_plan(profile, microbatches, rng, has_host=False)
        plans = [replace(one, **precision) for one in (drawn, *(wider for _, wider in relaxed(drawn)))]
    refusal = ""
    for plan in plans:
        given = replace(case, plan=json.loads(plan.to_json()))
        try:
            with begun(given, build(given)) as job:
                return given, tensor_peak(job)
        except memfit.MemfitError as error:
            refusal = f"{type(error).__name__}: {error}"[:300]
        gc.collect()
    return refusal, 0


def _below_limit(
    rng: random.Random, case: Case, profile: memfit.Profile, resident_bytes: int
) -> tuple[Case | str, int]:
    import memfit
    from memfit.core.errors import DoesNotFitError
    from predicting.measuring import build

    trace = profile.traces[profile.batch_rows]
    plain = profile.weight_bytes + sum(profile.state_bytes.values()) + trace.plain_peak_bytes
    limit = resident_bytes + max(LEAST_BYTES + 96 * common.MIB, int(rng.uniform(0.33, 1.0) * plain))
    for _ in range(3):
        given = replace(case, limit_bytes=limit)
        try:
            with begun(given, build(given)) as job:
                return given, tensor_peak(job)
        except DoesNotFitError as error:
            if error.smallest_limit_bytes is None:
                return str(error)[:300], 0
            limit = int(1.05 * error.smallest_limit_bytes)
        except memfit.MemfitError as error:
            return f"{type(error).__name__}: {error}"[:300], 0
        gc.collect()  # the error held the frames of the fit, and they the model
    return "no limit was found", 0


@contextmanager
def begun(case: Case, parts: tuple[Any, ...]) -> Iterator[memfit.Job]:
    """The job of a case, closed at the end; what was offloaded is thrown away."""
    import memfit
    from memfit.core.plan import Plan

    plan: Plan | None = None if case.plan is None else Plan.from_json(json.dumps(case.plan))
    with tempfile.TemporaryDirectory(prefix="memfit-predictions-") as directory:
        job = memfit.fit(
            *parts,
            plan=plan,
            limit=case.limit_bytes,
            directory=Path(directory) / "homes",
            max_grad_norm=case.clip,
            allow=case.allow,
        )
        try:
            yield job
        finally:
            job.close(restore=False)


def tensor_peak(job: memfit.Job) -> int:
    """The predicted peak of a job's tensors; staging of the disk's threads is none."""
    from memfit.step.lower import lower
    from memfit.step.predict import predict

    return predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0)).peak_bytes


def as_json(case: Case) -> dict[str, Any]:
    """As `Case.read` takes it."""
    return json.loads(json.dumps(asdict(case)))
