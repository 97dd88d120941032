"""Small models of every model type of transformers under random mixed plans, their gradients bit for bit beside plain PyTorch's.

    python benchmarks/sweep.py --seed 1,2,3                        all model types, two plans a seed (one with two microbatches)
    python benchmarks/sweep.py --seed 7 --part 2/4 --plans 6       a quarter of them
    python benchmarks/sweep.py --seed 3 --models qwen2_vl,detr     some
    python benchmarks/sweep.py --seed 1,2,3 --join A.json,B.json   one table of the tables of parts

In: seeds. Out: a table in `benchmarks/results/sweep-SEEDS.json` (one row a plan), and a summary. A run that was stopped goes on where it stood; rows of an
earlier run under the same seeds are taken from the file unless `--again` is given (all of them, or only those that `--again failed` names). Several seeds at once
cost little more than one: a model is traced once.

Every model runs in a process of its own (a fork of one that has loaded torch and transformers), with a limit of CPU time: a crash is a row like another. Outcomes:
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
import resource
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

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

Row = dict[str, Any]
WAITS = 20
"""Seconds by the clock that are waited for one of CPU time, on a machine that is shared."""
RESULTS = Path(__file__).parent / "results"


def in_a_fork(work: Callable[[], list[Row]], limit_s: float) -> tuple[list[Row], str]:
    """Rows that `work` makes in a child, and how the child ended where it did not end well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 10))
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
    text, ends = b"", time.monotonic() + WAITS * limit_s
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, ends - time.monotonic()))
            piece = pipe.read(1 << 16) if ready else None
            if piece is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return [], f"it was not done after {WAITS * limit_s:.0f} s"
            if not piece:
                break
            text += piece
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return [], f"it was not done after {limit_s:.0f} s of CPU time"
    return (json.loads(text), "") if code == 0 else ([], f"the process ended with {code}")


def try_model(model_type: str, seeds: Sequence[int], plans: int, counts: Sequence[int]) -> list[Row]:
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
            "seed": seed,
            **try_one(subject, f"{seed} {model_type}", index, counts[index % len(counts)], known),
        }
        for seed in seeds
        for index in range(plans)
    ]


def try_one(subject: Any, seed: str, index: int, microbatches: int, known: dict[Any, Any]) -> Row:
    """One plan of a model: what was drawn, and how it went."""
    import memfit
    from sweeping.batches import cut_by_rows
    from sweeping.drawing import draw_plan
    from sweeping.reference import plain_step
    from sweeping.tracing import profile_of, traced_once
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
    drawn, changed = dice.getstate(), []
    for split in (None, cut_by_rows):
        dice.setstate(drawn)
        model = subject.build()
        with traced_once(known):
            before = len(known)
            try:
                profile = profile_of(subject, model, microbatches, optimizer, split)
            except memfit.MemfitError as error:
                refusal = f"{type(error).__name__}: {brief(error)}"
                if split is None and "it is not cut" in refusal:
                    # Which rows the tensors have in common only the user knows.
                    changed.append(f"fit(split=...): {refusal}")
                    continue
                return {**row, "outcome": "refused", "detail": refusal}
            except Exception as error:  # noqa: BLE001 - an outcome like another
                return {**row, "outcome": "FAILED", "detail": f"profile: {type(error).__name__}: {brief(error)}"}
            plan = draw_plan(profile, microbatches, dice, has_host=has_host)
            draw = Draw(optimizer=optimizer, seed=step_seed, has_host=has_host, profile=profile, split=split)
            trial = try_plan(subject, plain, plan, draw, model if len(known) > before and split is None else None)
        row |= {"outcome": trial.outcome, "detail": trial.detail, "seconds": round(trial.seconds, 2)}
        changed += trial.changed
        break
    return {**row, "changed": changed} if changed else row


def sweep(
    models: Sequence[str],
    seeds: Sequence[int],
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
        found, ended = in_a_fork(lambda name=model_type: try_model(name, seeds, plans, counts), limit_s)
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
            reasons[f"{row['outcome']}, {row.get('microbatches', 1)}: {row.get('detail', '')[:200]}"].append(
                row["model"]
            )
        for change in row.get("changed", ()):
            reasons[f"changed, {row.get('microbatches', 1)}: {change[:200]}"].append(row["model"])
    for reason, names in sorted(reasons.items()):
        lines.append(f"  {reason}: {len(names)}: {', '.join(sorted(set(names))[:8])}")
    return "\n".join(lines)


def write_table(path: Path, head: Row, rows: list[Row]) -> None:
    """A line a row, in the place of the old file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    lines = ",\n".join(json.dumps(row) for row in rows)
    new.write_text(f'{json.dumps(head)[:-1]},\n"rows": [\n{lines}\n]}}\n')
    new.replace(path)


def join(parts: Sequence[Path], path: Path) -> None:
    """One table of the tables of parts, sorted by model, of what they found; where several have a model, the last one's rows. Commits and commands are all told."""
    tables = [json.loads(part.read_text()) for part in parts]
    found: dict[str, list[Row]] = {}
    for table in tables:
        for model in {row["model"] for row in table["rows"]}:
            found[model] = [_short(row) for row in table["rows"] if row["model"] == model]
    rows = [row for model in sorted(found) for row in found[model]]
    head = {**tables[0], "command": [t["command"] for t in tables], "commit": [t["commit"] for t in tables]}
    del head["rows"]
    write_table(path, head, rows)
    print(summarize(rows))


def _short(row: Row) -> Row:
    """Without what says nothing, and long words cut."""
    kept = {name: value for name, value in row.items() if name != "seconds" and value not in ("", [])}
    if "detail" in kept:
        kept["detail"] = kept["detail"][:200]
    if "changed" in kept:
        kept["changed"] = [words[:160] for words in kept["changed"]]
    return kept


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
    parser.add_argument("--seed", default="1", help="numbers, with commas")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th model type from the i-th on")
    parser.add_argument("--models", default="", help="names of model types, with commas")
    parser.add_argument("--plans", type=int, default=2, help="of each model under each seed")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of CPU time that a model may take")
    parser.add_argument("--join", default="", help="tables of parts, with commas: nothing is run")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--again", choices=("all", "failed"), default=None)
    parser.add_argument("--microbatches", default="1,2", help="how many, by turns")
    options = parser.parse_args(arguments)
    counts, seeds = ([int(n) for n in words.split(",")] for words in (options.microbatches, options.seed))
    which, of = (int(n) for n in options.part.split("/"))
    suffix = "" if of == 1 else f"-{which}of{of}"
    path = options.out or RESULTS / f"sweep-{options.seed.replace(',', '-')}{suffix}.json"
    if options.join:
        join([Path(name) for name in options.join.split(",")], path)
        return 0

    import torch
    import transformers
    import transformers.modeling_utils
    from transformers.models.auto import modeling_auto  # noqa: F401 - loaded once, for all forks

    import memfit.api  # noqa: F401 - so is this
    from sweeping.heads import model_types

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    models = [name for name in options.models.split(",") if name] or model_types()
    models = models[which - 1 :: of]
    known: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() and options.again != "all" else []
    if options.again == "failed":
        broken = {row["model"] for row in known if row["outcome"] in ("FAILED", "refused", "not built", "not split")}
        known = [row for row in known if row["model"] not in broken]
    if options.models:
        known = [row for row in known if row["model"] not in models or options.again is None]

    head = {
        "command": "python benchmarks/sweep.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "commit": commit(), "torch": torch.__version__, "transformers": transformers.__version__, "seeds": seeds, "plans": options.plans,
    }  # fmt: skip

    def write(rows: list[Row]) -> None:
        write_table(path, head, rows)

    rows = sweep(models, seeds, options.plans, counts, known, write, options.limit)
    write(rows)
    print(summarize(rows))
    return 1 if any(row["outcome"] == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
