"""The table of a run, in Markdown, from whatever parts there are.

In: the record that `gpu.py` writes as JSON. Out: text. A figure that is missing is a dash; a part that did not end well stands in the last section with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MIB, GB = 1 << 20, 1e9
Record = Mapping[str, Any]


def markdown(record: Record) -> str:
    """All sections that have something in them."""
    parts: Mapping[str, Record] = record["parts"]
    sections = [
        _head(record, parts),
        _hardware(_notes(parts, "machine")),
        _tests(parts),
        _peaks(parts),
        _times(parts),
        _generation(parts),
        _unfinished(record, parts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(record: Record, parts: Mapping[str, Record]) -> str:
    facts = _notes(parts, "machine")
    done = sum(part["outcome"] == "done" for part in parts.values())
    lines = [f"# memfit on {facts.get('name', record['device'])}"]
    if record["is_emulated"]:
        lines.append("**An emulated device: every time below is meaningless, and so are rates. Bytes and bits count.**")
    lines.append(
        f"{done} of {record['asked']} parts done, {record['seconds']:.0f} s, size `{record['size']}`, begun {record['begun']}."
    )
    names = (
        "memfit",
        "commit",
        "torch",
        "transformers",
        "python",
        "cuda",
        "cudnn",
        "driver",
        "capability",
        "gpus_beside",
    )
    names += ("kernel", "processor", "cores", "file_system", "locked_memory_limit")
    told = [f"{name} {facts[name]}" for name in names if facts.get(name) is not None]
    if told:
        lines.append("; ".join(told) + ".")
    return "\n\n".join(lines)


def _hardware(facts: Record) -> str:
    if "total_bytes" not in facts:
        return ""
    rows = [
        ("device memory, MiB", _mib(facts["total_bytes"])),
        ("of it used when this began, by all processes, MiB", _mib(facts.get("used_before_bytes"))),
        ("context and libraries of a process, by the driver, MiB", _mib(facts.get("context_bytes"))),
        ("host memory, MiB", _mib(facts.get("host_bytes"))),
        ("disk free, MiB", _mib(facts.get("disk_free_bytes"))),
    ]
    if "hardware" in facts:
        found = json.loads(facts["hardware"])
        rows += [
            ("products in fp32, TFLOP/s", f"{found['flops_per_s'] / 1e12:.2f}"),
            ("products in bf16, TFLOP/s", _over(found.get("bf16_flops_per_s"), 1e12)),
            ("host to device alone, GB/s", _over((found.get("host") or {}).get("read_bytes_per_s"), GB)),
            ("device to host alone, GB/s", _over((found.get("host") or {}).get("write_bytes_per_s"), GB)),
            ("disk read, write, GB/s", f"{_over(found['disk']['read_bytes_per_s'], GB)}, {_over(found['disk']['write_bytes_per_s'], GB)}"),
            ("states decoded and encoded, elements/s", f"{found['codec_elements_per_s']:.2g}"),
            ("AdamW that plans are priced with, parameters/s", f"{found['update_elements_per_s']:.2g}"),
        ]  # fmt: skip
    if "both_ways_bytes_per_s" in facts:
        rows.append(("both ways at once, each, GB/s", _over(facts["both_ways_bytes_per_s"][0], GB)))
    for name, words in (("update_elements_per_s", "on the device"), ("host_update_elements_per_s", "on the host")):
        if name in facts:
            rows.append((f"torch's AdamW {words}, parameters/s", f"{facts[name]:.2g}"))
    return "## Machine\n\n" + table(("what", "measured"), rows)


def _tests(parts: Mapping[str, Record]) -> str:
    notes = _notes(parts, "device tests")
    if "summary" not in notes:
        return ""
    return "\n".join([f"## Device tests\n\n{notes['summary']}", *(f"- `{line}`" for line in notes["failures"])])


def _peaks(parts: Mapping[str, Record]) -> str:
    rows = []
    for name, part in parts.items():
        notes = part["notes"]
        if part["work"] != "memfit" or "allocated_bytes" not in notes:
            continue
        predicted = notes["predicted_bytes"]
        rows.append(
            (
                name,
                _mib(predicted),
                _mib(notes["allocated_bytes"]),
                f"{notes['allocated_bytes'] / predicted:.3f}" if predicted else "-",
                _mib(notes["reserved_bytes"]),
                _mib(notes.get("driver_bytes")),
                _limit(notes),
                f"{_mib(notes.get('predicted_host_bytes'))}, {_mib(notes.get('host_peak_bytes'))}",
                _bits(notes, parts),
            )
        )
    head = (
        "case", "predicted", "allocated", "ratio", "reserved", "process by driver", "limit (highest reserved)", "host: predicted, whole process",
        "weights beside plain's",
    )  # fmt: skip
    return "" if not rows else "## Peaks of a steady step, MiB, and the numbers\n\n" + table(head, rows)


def _limit(notes: Record) -> str:
    if "limit_bytes" not in notes:
        return "-"
    verdict = "" if notes["whole_reserved_bytes"] <= notes["limit_bytes"] else " PASSED"
    return f"{_mib(notes['limit_bytes'])} ({_mib(notes['whole_reserved_bytes'])}{verdict})"


def _bits(notes: Record, parts: Mapping[str, Record]) -> str:
    words = "not compared"
    if "difference" in notes:
        found = notes["difference"]
        words = (
            "same bits"
            if not found["other"]
            else f"{found['other']} of {found['tensors']} differ, by {found['largest']:.1e}"
        )
    if notes.get("departures"):
        words += f"; departed: {notes['departures'][0]}"
    return f"{words}; {notes['numerics']}"


def _times(parts: Mapping[str, Record]) -> str:
    rows = []
    for name, part in parts.items():
        notes = part["notes"]
        if part["work"] not in ("plain", "fsdp", "memfit") or notes.get("step_s") is None:
            continue
        plain = _notes(parts, f"{name.split(':')[0]}: plain").get("step_s")
        rows.append(
            (
                name,
                f"{notes['step_s']:.3g}",
                "-" if plain is None else f"{notes['step_s'] / plain:.2f}",
                f"{notes['slowest_step_s']:.3g}",
                "-" if notes.get("predicted_step_s") is None else f"{notes['predicted_step_s']:.3g}",
                _mib(notes.get("allocated_bytes")),
                _mib(notes.get("reserved_bytes")),
                f"{notes['losses'][0]:.5f}, {notes['losses'][-1]:.5f}",
            )
        )
    head = (
        "case",
        "step, s",
        "of plain's",
        "slowest",
        "predicted, s",
        "allocated, MiB",
        "reserved, MiB",
        "first, last loss",
    )
    if not rows:
        return ""
    text = "## Steps of the same batch\n\n" + table(head, rows)
    spread = [
        f"{name.split(':')[0]} with {count} microbatch{'es' if count != '1' else ''} {_repeats(value)}"
        for name, part in parts.items()
        for key, value in part["notes"].items()
        if key.startswith("repeats_") and (count := key.removeprefix("repeats_"))
    ]
    return text + ("\n\nPlain PyTorch run twice: " + "; ".join(spread) + "." if spread else "")


def _repeats(value: Record) -> str:
    return (
        "repeats its bits"
        if not value["other"]
        else f"differs from itself by {value['largest']:.1e} in {value['other']} tensors"
    )


def _generation(parts: Mapping[str, Record]) -> str:
    rows = []
    for name, part in parts.items():
        notes = part["notes"]
        if part["work"] != "inference" or "token_s" not in notes:
            continue
        rows.append(
            (
                name,
                "the same" if notes["same_tokens"] else "OTHERS",
                f"{notes['token_s']:.3g}",
                f"{notes['plain_token_s']:.3g}",
                _mib(notes["weight_bytes"]),
                _mib(notes.get("allocated_bytes")),
                _mib(notes["plain_allocated_bytes"]),
                _mib(notes["read_bytes"]),
                _mib(notes["cache_moved_bytes"]),
            )
        )
    head = (
        "case",
        "tokens",
        "s a token",
        "plain's",
        "weights here at most, MiB",
        "allocated, MiB",
        "plain's",
        "read, MiB",
        "caches moved, MiB",
    )
    return "" if not rows else "## Generation\n\n" + table(head, rows)


def _unfinished(record: Record, parts: Mapping[str, Record]) -> str:
    ends = [
        f"- **{name}**: {part['outcome']}: {part['words']}" for name, part in parts.items() if part["outcome"] != "done"
    ]
    if not ends:
        return "" if record["is_complete"] else "## Not over\n\nThis run has not come to its end."
    return (
        "## What did not end well, or was not run\n\n"
        + "\n".join(ends)
        + "\n\nWhat these said last is in the JSON file."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. A bar inside a cell would end it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _notes(parts: Mapping[str, Record], name: str) -> Record:
    return parts[name]["notes"] if name in parts else {}


def _mib(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / MIB:,.0f}" if nbytes >= 100 * MIB else f"{nbytes / MIB:.1f}"


def _over(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.2f}"
