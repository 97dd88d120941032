"""The work of each child process: the machine's figures, the device tests, plain PyTorch, FSDP2, memfit under a plan, generation.

In: a request and a place for notes. Out: notes, written as soon as something is measured. What every work has in common is in `Setting`.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_check.notes import Notes
from gpu_check.plans import make_plan
from gpu_check.subjects import SIZES, SUBJECTS, Batch, Size, Subject
from gpu_check.views import device_bytes_by_driver, host_peak_bytes
from memfit.core.tiers import Tier

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 2
TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Input of every work.

    Attributes:
        device: that everything runs on.
        size: of models and batches.
        directory: for homes on disk and reference weights.
        earlier: notes of parts that are done, by name.
        notes: of this part.
    """

    device: torch.device
    size: str
    directory: Path
    earlier: Mapping[str, Mapping[str, Any]]
    notes: Notes

    @property
    def sizes(self) -> Size:
        """Seed of models and batches."""
        return SIZES[self.size]

    @property
    def timed_steps(self) -> int:
        """Fewer where seconds mean nothing."""
        return 1 if self.size == "tiny" else TIMED_STEPS

    def weights(self, subject: str, count: int) -> Path:
        """Where plain PyTorch's weights are left for comparison."""
        return self.directory / f"{subject}-{count}.pt"


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _reset_peaks(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _peaks(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {}
    return {
        "allocated_bytes": torch.accelerator.max_memory_allocated(device),
        "reserved_bytes": torch.accelerator.max_memory_reserved(device),
        "driver_bytes": device_bytes_by_driver(device),
    }


def _timed(setting: Setting, step: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Steps, and what is known after each of them: losses, and seconds of those after the warm-up."""
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(WARM_UP_STEPS + setting.timed_steps):
        _synchronize(setting.device)
        began = time.perf_counter()
        losses.append(step())
        _synchronize(setting.device)
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - began)
        yield {
            "losses": losses,
            "step_s": statistics.median(seconds) if seconds else None,
            "slowest_step_s": max(seconds, default=None),
        }


# --- plain PyTorch and FSDP2 ----------------------------------------------------------------------------------------------------


def plain(setting: Setting, subject: str, counts: list[int] | None = None, *, checkpoints: bool = False) -> None:
    """Plain loops, one for each number of microbatches; the first is timed, and what its memory was is noted. Twice, to see whether plain repeats itself."""
    kind = SUBJECTS[subject]
    batch = kind.batch(setting.sizes, setting.device)
    for count in counts or [1]:
        found: dict[str, Tensor] | None = None
        for again in range(1 if checkpoints else 2):
            model = kind.build(setting.sizes, setting.device)
            if checkpoints:
                _checkpointed(model)
            optimizer = kind.optimizer(model)
            step = _plain_step(kind, model, optimizer, batch, count)
            _reset_peaks(setting.device)
            notes: dict[str, Any] = {}
            for notes in _timed(setting, step):
                if count == 1 and not again:
                    setting.notes.note(**notes, **_peaks(setting.device))
            weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
            if found is None:
                found = weights
                if count == 1:
                    setting.notes.note(parameters=sum(p.numel() for p in model.parameters()))
                if not checkpoints:
                    torch.save(weights, setting.weights(subject, count))
            else:
                setting.notes.note(**{f"repeats_{count}": _difference(found, weights)})
            del model, optimizer, step


def _plain_step(
    kind: Subject, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, count: int
) -> Callable[[], float]:
    parts = [
        dict(zip(batch, values, strict=True)) for values in zip(*(t.chunk(count) for t in batch.values()), strict=True)
    ]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            loss = kind.loss(model, part)
            (loss if count == 1 else loss / count).backward()
            total += float(loss.detach()) / count
        optimizer.step()
        return total

    return step


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def fsdp(setting: Setting, subject: str, device: str | None = None, *, checkpoints: bool = False) -> None:
    """FSDP2 over one rank: every layer and then the model under `fully_shard`, parameters and states on the host, AdamW there."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    where = setting.device if device is None else torch.device(device)
    backend = "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl"
    kind = SUBJECTS[subject]
    with contextlib.ExitStack() as stack:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh(where.type, (1,))
        model: Any = kind.build(setting.sizes, where)
        if checkpoints:
            _checkpointed(model)
        policy = CPUOffloadPolicy(pin_memory=where.type != "cpu")
        for layer in model.get_submodule(kind.layers):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        optimizer = kind.optimizer(model)
        batch = kind.batch(setting.sizes, where)
        _reset_peaks(where)
        for notes in _timed(setting, _plain_step(kind, model, optimizer, batch, 1)):
            setting.notes.note(**notes, **_peaks(where), host_peak_bytes=host_peak_bytes())


# --- memfit ---------------------------------------------------------------------------------------------------------------------


def ours(
    setting: Setting,
    subject: str,
    *,
    limit_share: float | None = None,
    allow: list[str] | None = None,
    chunks: bool = False,
    **wishes: Any,
) -> None:
    """A job under one plan, or under a limit that is a share of plain PyTorch's memory: predictions, measurements, and plain's weights beside ours."""
    import memfit
    from memfit.core.hardware import Hardware, in_dtype
    from memfit.step.lower import lower
    from memfit.step.predict import predict

    kind, notes = SUBJECTS[subject], setting.notes
    beside = setting.earlier.get(f"{subject}: plain", {})
    machine = setting.earlier.get("machine", {}).get("hardware")
    model = kind.build(setting.sizes, setting.device)
    optimizer = kind.optimizer(model)
    batch = kind.batch(setting.sizes, setting.device)
    given: dict[str, Any] = {"allow": set(allow or ()), "directory": setting.directory / "homes"}
    if limit_share is None:
        tokens = setting.sizes.rows * setting.sizes.tokens // 4 if chunks else None
        profile = memfit.profile(model, optimizer, kind.loss, batch)
        given["plan"] = make_plan(profile, chunk_tokens=tokens, **wishes)
    else:
        limit = _limit(setting, limit_share, beside)
        notes.note(limit_bytes=limit)
        given["limit"] = limit
    if machine is not None:
        given["hardware"] = machine
    began = time.perf_counter()
    with memfit.fit(model, optimizer, kind.loss, batch, **given) as job:
        notes.note(fit_s=time.perf_counter() - began, reason=job.reason, numerics=job.numerics.short())
        speeds = None if machine is None else in_dtype(Hardware.from_json(machine), job.plan.compute_dtype)
        device = "cpu" if speeds is None else speeds.device
        priced = predict(lower(job.schedule, job.plan, job.profile, device=device), speeds)
        notes.note(
            predicted_bytes=priced.peak_bytes,
            predicted_host_bytes=priced.peak_in(Tier.HOST),
            predicted_disk_bytes=priced.peak_in(Tier.DISK),
            predicted_step_s=priced.seconds if machine is not None else None,
            microbatches=job.plan.microbatches,
        )
        departures: list[str] = []

        def step() -> float:
            result = job.step(batch)
            departures.extend(result.departures)
            return result.loss

        for after in _timed(setting, step):
            phases = {phase.name: phase for phase in job.proof().phases}
            steady = phases.get("steady", phases["first step"])
            notes.note(
                **after,
                departures=departures[:3],
                allocated_bytes=steady.peak_bytes,
                reserved_bytes=steady.held_peak_bytes,
                driver_bytes=device_bytes_by_driver(setting.device),
                host_peak_bytes=host_peak_bytes(),
                whole_reserved_bytes=max(phase.held_peak_bytes for phase in phases.values()),
            )
    reference = setting.weights(subject, notes.values["microbatches"])
    if "bf16" not in given["allow"] and reference.exists():
        theirs = torch.load(reference, weights_only=True)
        notes.note(difference=_difference(theirs, {name: p.detach().cpu() for name, p in model.named_parameters()}))


def _limit(setting: Setting, share: float, beside: Mapping[str, Any]) -> int:
    if "reserved_bytes" not in beside:
        raise SystemExit("the limit is a share of plain PyTorch's memory, which was not measured")
    limit = int(share * beside["reserved_bytes"])
    # The caching allocator takes segments of 20 MiB and libraries a workspace of 32: half of a few MiB would be a limit on those.
    return max(limit, 96 << 20) if setting.size == "tiny" else limit


def _difference(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors that have other bits, and the largest difference in units of the tensor's largest magnitude."""
    other = [name for name, value in theirs.items() if not torch.equal(value, ours[name])]
    largest = 0.0
    for name in other:
        a, b = theirs[name].double(), ours[name].double()
        largest = max(largest, float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)))
    return {"tensors": len(theirs), "other": len(other), "largest": largest}


def inference(setting: Setting, subject: str, cache_limit: int | None) -> None:
    """Greedy generation plainly and with weights (and caches) away: the same tokens? Seconds a token, memory."""
    import memfit

    kind, notes, device = SUBJECTS[subject], setting.notes, setting.device
    new_tokens = 4 if setting.size == "tiny" else 16
    model: Any = kind.build(setting.sizes, device).eval()
    model.config.use_cache = True
    prompt = kind.batch(setting.sizes, device, seed=2)["input_ids"][:2, : setting.sizes.tokens // 2]

    def generate() -> Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    _reset_peaks(device)
    with torch.no_grad():
        generate()
        _synchronize(device)
        began = time.perf_counter()
        expected = generate()
        _synchronize(device)
    notes.note(
        plain_token_s=(time.perf_counter() - began) / new_tokens,
        plain_allocated_bytes=torch.accelerator.max_memory_allocated(device),
    )
    with memfit.infer(model, cache_limit=cache_limit, directory=setting.directory / "homes") as session:
        generate()
        _reset_peaks(device)
        began = time.perf_counter()
        got = generate()
        _synchronize(device)
        notes.note(
            token_s=(time.perf_counter() - began) / new_tokens,
            weight_bytes=session.weight_bytes,
            read_bytes=session.read_bytes,
            cache_moved_bytes=sum(session.cache_moved_bytes),
            same_tokens=bool(torch.equal(expected, got)),
            **_peaks(device),
        )


# --- machine and tests ----------------------------------------------------------------------------------------------------------


def machine(setting: Setting) -> None:
    """Versions, then what memfit's probe finds, then both ways of the link at once."""
    from gpu_check.views import describe
    from memfit.core.limits import Limits
    from memfit.machine.machine import open_machine
    from memfit.machine.probing import probe

    setting.notes.note(**describe(setting.device, setting.directory))
    one = torch.zeros(1, device=setting.device)
    _synchronize(setting.device)
    reserved = torch.accelerator.memory_reserved(setting.device)
    driver = device_bytes_by_driver(setting.device)
    setting.notes.note(context_bytes=None if driver is None else driver - reserved)
    del one
    probed = probe(
        open_machine(setting.device, Limits()), setting.directory / "homes", probes_bf16=True, probes_codecs=True
    )
    setting.notes.note(hardware=probed.to_json())
    setting.notes.note(both_ways_bytes_per_s=_both_ways(setting.device))
    setting.notes.note(
        update_elements_per_s=_updates(setting.device), host_update_elements_per_s=_updates(torch.device("cpu"))
    )


def _both_ways(device: torch.device) -> list[float]:
    """Bytes a second to the device and from it, while the other way is busy too: pinned memory, two streams."""
    nbytes = 256 << 20 if device.type == "cuda" else 1 << 20
    here = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)]
    best = float("inf")
    for _ in range(3):
        _synchronize(device)
        began = time.perf_counter()
        for way, stream in enumerate(streams):
            with stream:
                source, to = (here[0], there[0]) if way == 0 else (there[1], here[1])
                to.copy_(source, non_blocking=True)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return [nbytes / best, nbytes / best]


def _updates(device: torch.device) -> float:
    """Parameters that torch's own AdamW updates in a second."""
    count = 1 << (24 if device.type == "cuda" else 20)
    weight = nn.Parameter(torch.zeros(count, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    best = float("inf")
    for _ in range(4):
        _synchronize(device)
        began = time.perf_counter()
        optimizer.step()
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return count / best


def tests(setting: Setting) -> None:
    """The tests of `tests/device` in a process of their own, and their summary."""
    command = [
        sys.executable, "-m", "pytest", "--color=no", "-q", "-p", "no:cacheprovider", "--device", setting.device.type, "tests/device",
    ]  # fmt: skip
    if setting.device.type == "late":
        command += ["-n", "2", "--dist", "worksteal"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    setting.notes.note(
        summary=lines[-1].strip("= ") if lines else f"pytest ended with {done.returncode}",
        passed=done.returncode == 0,
        failures=[line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))][:40],
    )
    if done.returncode:
        print(done.stdout[-5000:], done.stderr[-500:], sep="\n")
        raise SystemExit(f"the device tests ended with {done.returncode}")


WORK: Mapping[str, Callable[..., None]] = {
    "machine": machine, "tests": tests, "plain": plain, "fsdp": fsdp, "memfit": ours, "inference": inference,
}  # fmt: skip
