"""Import of every script of this folder, plain or not: where to write, the limit, local data, what is noted for the table.

In: environment variables of `benchmarks/host_scripts.py`; without them a script runs by itself (`SCRIPT_OUT`, `SCRIPT_LIMIT`, `SCRIPT_RESUME`). Out: one line
of JSON behind the script's own output.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_GROUP = os.environ.get("SCRIPT_GROUP")
if _GROUP is not None:
    # First of all: what torch takes is this group's.
    (Path(_GROUP) / "cgroup.procs").write_text(str(os.getpid()))

import torch

OUT = Path(os.environ.get("SCRIPT_OUT", "out"))
OUT.mkdir(parents=True, exist_ok=True)
LIMIT = int(os.environ.get("SCRIPT_LIMIT", str(1 << 30)))
RESUME = "SCRIPT_RESUME" in os.environ
STEPS, STOP = 6, 4
"""Updates of a whole run; the first process ends behind the fourth, and the second goes on from the save behind the third."""
SAVE = 3
WORDS = 8000
_noted: dict[str, Any] = {}
_ticks: list[float] = []


def imported() -> None:
    """Marks the end of the imports: what is resident there is R, and the peak begins anew. The limit of a plain process's group is set here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _noted["resident"] = _status("VmRSS")
    if _GROUP is not None and "SCRIPT_ROOM" in os.environ:
        # Libraries' pages may have been charged to whoever read them first: what counts is the room above what this group has now.
        counted = dict(line.split() for line in (Path(_GROUP) / "memory.stat").read_text().splitlines())
        allowed = int(counted["rss"]) + int(counted["mapped_file"]) + int(os.environ["SCRIPT_ROOM"])
        (Path(_GROUP) / "memory.limit_in_bytes").write_text(str(allowed))
    torch.manual_seed(0)


def tick() -> bool:
    """Marks the end of an update.

    Returns:
        True where the first process ends, as if it was interrupted.
    """
    _ticks.append(time.process_time())
    return not RESUME and "SCRIPT_UNBROKEN" not in os.environ and len(_ticks) == STOP


def told(**values: Any) -> None:
    """Prints what the run came to."""
    seconds = [after - before for before, after in itertools.pairwise(_ticks)]
    print(
        json.dumps(
            _noted | {key: _plain(value) for key, value in values.items()}
            | {"peak": _status("VmHWM"), "updates": len(_ticks), "step_cpu_s": statistics.median(seconds), "cpu_s": time.process_time()}
        )
    )  # fmt: skip
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    return [float(one) for one in value] if isinstance(value, list) else float(value)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


# --- hosts' callbacks -----------------------------------------------------------------------------


def clock() -> Any:
    """Returns a callback of `Trainer` that ticks, and ends the first process."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= tick()

    return Clock()


def losses(trainer: Any) -> dict[str, Any]:
    """Returns what a `Trainer` logged."""
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    }


# --- data -----------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """Returns a tokenizer of `WORDS` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(WORDS - 3))]
    made = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(index: int, words: int = 48) -> str:
    """Returns a row of text: words drawn unevenly, so that there is something to learn."""
    drawn = torch.rand(words, generator=torch.Generator().manual_seed(index)).pow(4).mul(WORDS - 4).long()
    return " ".join(f"w{int(one)}" for one in drawn)


def texts(rows: int, first: int = 0, words: int = 48) -> Any:
    """Returns rows of text as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_dict({"text": [text(first + index, words) for index in range(rows)]})


def tokens(rows: int, length: int, first: int = 0) -> torch.Tensor:
    """Returns rows of tokens, of shape (rows, length)."""
    drawn = [torch.rand(length, generator=torch.Generator().manual_seed(first + row)) for row in range(rows)]
    return torch.stack(drawn).pow(4).mul(WORDS - 4).long() + 3


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images with a class each, drawn when they are asked for."""

    def __init__(self, rows: int, side: int, classes: int = 10) -> None:
        self.rows, self.side, self.classes = rows, side, classes

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(3, self.side, self.side, generator=drawn), index % self.classes


# --- a pretrained model ---------------------------------------------------------------------------


def base() -> str:
    """Returns the directory of a model to adapt, written by a process of its own if it is not there."""
    directory = OUT.parent / "base"
    if not directory.is_dir():
        subprocess.run([sys.executable, __file__, str(directory)], check=True)
    return str(directory)


def _write_base(directory: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8)
    ).save_pretrained(directory)  # fmt: skip


if __name__ == "__main__":
    _write_base(sys.argv[1])
