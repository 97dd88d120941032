"""Small models of every model type of transformers under random mixed plans, their gradients bit for bit beside plain PyTorch's.

    python benchmarks/sweep.py --seed 1                            all model types, four plans each (half with two microbatches)
    python benchmarks/sweep.py --seed 7 --part 2/4 --plans 6       a quarter of them
    python benchmarks/sweep.py --seed 3 --models qwen2_vl,detr     some

In: a seed. Out: a table in `benchmarks/results/sweep-SEED.json` (one row a plan), and a summary. A run that was stopped goes on where it stood; rows of an
earlier run under the same seed are taken from the file unless `--again` is given (all of them, or only those that `--again failed` names).

Every model runs in a process of its own (a fork of one that has loaded torch and transformers), with a time limit: a crash is a row like another. Outcomes:
`bitwise`: losses, gradients, weights and buffers after a step have plain PyTorch's bits; `declared rounding`: so have all but weights whose sums memfit says
it regroups, and these differ by no more than the roundings of such a sum; `refused`: memfit said that it does not do this, under every plan that its
refusals leave; `plain does not repeat`: plain PyTorch from equal seeds has not the same bits twice; `FAILED`: anything else.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import random
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def in_a_fork(work: Callable[[], list[Row]], limit_s: float) -> tuple[list[Row], str]:
    """Rows that `work` makes in a child, and how the child ended where it did not end well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(work()))
            code = 0
        except BaseException:  # noqa: BLE001 - the parent records that the child ended badly, whatever it was
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    text, ends = b"", time.monotonic() + limit_s
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, ends - time.monotonic()))
            piece = pipe.read(1 << 16) if ready else None
            if piece is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return [], f"it was not done after {limit_s:.0f} s"
            if not piece:
                break
            text += piece
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return (json.loads(text), "") if code == 0 else ([], f"the process ended with {code}")


def try_model(model_type: str, seed: int, plans: int, counts: Sequence[int]) -> list[Row]:
    """All plans of one model type."""
    import torch

    from sweeping.subjects import NotBuiltError, find

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        subject = find(model_type)
    except NotBuiltError as error:
        return [{"model": model_type, "outcome": "not built", "detail": str(error)[:400]}]
    known: dict[Any, Any] = {}
    return [
        {
            "model": model_type,
            "class": subject.kind.__name__,
            **try_one(subject, f"{seed} {model_type}", index, counts[index % len(counts)], known),
        }
        for index in range(plans)
    ]


def try_one(subject: Any, seed: str, index: int, microbatches: int, known: dict[Any, Any]) -> Row:
    """One plan of a model: what was drawn, and how it went."""
    import memfit
    from sweeping.drawing import draw_plan
    from sweeping.reference import make_optimizer, plain_step
    from sweeping.subjects import loss_of
    from sweeping.tracing import traced_once
    from sweeping.trial import Draw, brief, try_plan

    dice = random.Random(f"{seed} {microbatches} {index}")
    optimizer, step_seed, has_host = dice.choice(["adamw", "sgd"]), dice.randrange(1 << 30), dice.random() < 0.5
    row: Row = {"plan": index, "microbatches": microbatches}
    try:
        plain = plain_step(subject, microbatches, optimizer, step_seed)
    except Exception as error:  # noqa: BLE001 - the halves of the batch are not batches of this model
        return {**row, "outcome": "not split", "detail": f"plain PyTorch: {type(error).__name__}: {brief(error)}"}
    if not plain.repeats(plain_step(subject, microbatches, optimizer, step_seed)):
        return {**row, "outcome": "plain does not repeat", "detail": ""}
    model = subject.build()
    with traced_once(known):
        before = len(known)
        try:
            profile = memfit.profile(
                model,
                make_optimizer(optimizer, model),
                loss_of,
                subject.copy_of_batch(),
                microbatches=[microbatches],
            )
        except memfit.MemfitError as error:
            return {**row, "outcome": "refused", "detail": f"{type(error).__name__}: {brief(error)}"}
        except Exception as error:  # noqa: BLE001 - an outcome like another
            return {**row, "outcome": "FAILED", "detail": f"profile: {type(error).__name__}: {brief(error)}"}
        plan = draw_plan(profile, microbatches, dice, has_host=has_host)
        draw = Draw(optimizer=optimizer, seed=step_seed, has_host=has_host, profile=profile)
        trial = try_plan(subject, plain, plan, draw, model if len(known) > before else None)
    row |= {"outcome": trial.outcome, "detail": trial.detail, "seconds": round(trial.seconds, 2)}
    return {**row, "changed": list(trial.changed)} if trial.changed else row


def sweep(
    models: Sequence[str],
    seed: int,
    plans: int,
    counts: Sequence[int],
    known: list[Row],
    write: Callable[[list[Row]], None],
    limit_s: float,
) -> list[Row]:
    """Rows of all models; `write` is called whenever there are more."""
    rows = list(known)
    done = {row["model"] for row in known}
    for number, model_type in enumerate(models):
        if model_type in done:
            continue
        began = time.monotonic()
        found, ended = in_a_fork(lambda name=model_type: try_model(name, seed, plans, counts), limit_s)
        if ended:
            found = [{"model": model_type, "outcome": "FAILED", "detail": ended}]
        rows += found
        said = Counter(row["outcome"] for row in found)
        print(
            f"{number + 1:4d}/{len(models)} {model_type:36s} {time.monotonic() - began:5.1f} s  {dict(said)}",
            file=sys.stderr,
            flush=True,
        )
        write(rows)
    return rows


def summarize(rows: Sequence[Row]) -> str:
    """What a person reads."""
    built = [row for row in rows if row["outcome"] != "not built"]
    lines = [
        f"{len({r['model'] for r in built})} model types trained, {len({r['model'] for r in rows} - {r['model'] for r in built})} not built"
    ]
    for microbatches in (1, 2):
        of = [row for row in built if row.get("microbatches", 1) == microbatches]
        counts = Counter(row["outcome"] for row in of)
        lines.append(
            f"{microbatches} microbatch{'es' if microbatches > 1 else ''}: {len(of)} plans: "
            + ", ".join(f"{n} {o}" for o, n in counts.most_common())
        )
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in built:
        if row["outcome"] in ("refused", "FAILED", "not split", "plain does not repeat"):
            reasons[f"{row['outcome']}, {row.get('microbatches', 1)}: {row['detail'][:200]}"].append(row["model"])
        for change in row.get("changed", ()):
            reasons[f"changed, {row.get('microbatches', 1)}: {change[:200]}"].append(row["model"])
    for reason, names in sorted(reasons.items()):
        lines.append(f"  {reason}: {len(names)}: {', '.join(sorted(set(names))[:8])}")
    return "\n".join(lines)


def commit() -> str:
    """Of the tree that runs; with a star where it was changed."""
    where = Path(__file__).parent.parent
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "src"], cwd=where, capture_output=True, text=True, check=False
    ).stdout.strip()
    return head + ("*" if changed else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th model type from the i-th on")
    parser.add_argument("--models", default="", help="names of model types, with commas")
    parser.add_argument("--plans", type=int, default=4)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds a model may take")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--again", choices=("all", "failed"), default=None)
    parser.add_argument("--microbatches", default="1,2", help="how many, by turns")
    options = parser.parse_args(arguments)
    counts = [int(n) for n in options.microbatches.split(",")]

    import torch
    import transformers
    import transformers.modeling_utils
    from transformers.models.auto import modeling_auto  # noqa: F401 - loaded once, for all forks

    import memfit.api  # noqa: F401 - so is this
    from sweeping.heads import model_types

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    which, of = (int(n) for n in options.part.split("/"))
    models = [name for name in options.models.split(",") if name] or model_types()
    models = models[which - 1 :: of]
    suffix = "" if of == 1 else f"-{which}of{of}"
    path = options.out or RESULTS / f"sweep-{options.seed}{suffix}.json"
    known: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() and options.again != "all" else []
    if options.again == "failed":
        broken = {row["model"] for row in known if row["outcome"] in ("FAILED", "refused", "not built", "not split")}
        known = [row for row in known if row["model"] not in broken]
    if options.models:
        known = [row for row in known if row["model"] not in models or options.again is None]

    head = {
        "command": "python benchmarks/sweep.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "commit": commit(), "torch": torch.__version__, "transformers": transformers.__version__, "seed": options.seed, "plans": options.plans,
    }  # fmt: skip

    def write(rows: list[Row]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**head, "rows": rows}, indent=0) + "\n")
        new.replace(path)

    rows = sweep(models, options.seed, options.plans, counts, known, write, options.limit)
    write(rows)
    print(summarize(rows))
    return 1 if any(row["outcome"] == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
