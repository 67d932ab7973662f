"""The tables of this page, made of the results that tools/gpu.py has recorded.

    python experiments/gpu/page.py            print them
    python experiments/gpu/page.py --write    write them into README.md
    python experiments/gpu/page.py --again    first predict all that was kept again, with today's model

A table shows the newest results of a GPU that have its part. Those of dry runs are never shown.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]  # simdist need not be installed

from verdicts import furthest_off, verdicts  # noqa: E402  of this folder

from simdist.report import page_command  # noqa: E402

RESULTS = HERE / "results"
NOTHING = "No GPU has run this part yet."
Rows = Sequence[Mapping[str, Any]]


def recorded(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the results of GPUs, the newest last."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted((each for each in found if not each["dry_run"]), key=lambda each: str(each["date"]))


def newest(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the newest results that have rows of a part, and the part; None if there are none."""
    for results in reversed(recorded(folder)):
        part = results["parts"].get(name)
        if part and part["rows"]:
            return results, part
    return None


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def about(results: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return on what a part ran, and whether all of it did."""
    ended = "" if part["status"] == "done" else f" The part was not finished: {part['status']}."
    return f"{_run(results)}.{ended}"


def _run(results: Mapping[str, Any]) -> str:
    """Name a run of the command."""
    gpus = f"{results['gpus']} x " if results.get("gpus", 1) > 1 else ""
    commit = f"{results['commit']}{' with changes' if results.get('dirty') else ''}"
    return f"{gpus}{results['device']}, {results['date']}, commit {commit}"


def _software(folder: Path) -> list[str]:
    """Return a line on the software of each run that the tables show."""
    shown = {_run(found[0]): found[0] for name in PARTS if (found := newest(name, folder)) is not None}
    return [
        f"* {name}: driver {of['driver']}, CUDA {of['cuda']}, NCCL {of['nccl']}, torch {of['torch']}, "
        f"triton {of['triton']}, numpy {of['numpy']}, Python {of['python']}."
        for name, of in shown.items()
    ] or [NOTHING]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def suite(rows: Rows) -> list[str]:
    """How many tests passed, and each that failed."""
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("passed", "failed", "skipped")}
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    lines = [f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped."]
    return lines + [f"* failed: `{name}`" for name in failed]


def plans(rows: Rows) -> list[str]:
    """Makespans and stragglers."""
    headings = ("trouble", "schedule", "simulated", "measured", "error", "stragglers charged", "delays off by at most")
    cells = [
        (
            row["trouble"],
            row["schedule"],
            f"{row['simulated_ms']:.1f} ms",
            f"{row['measured_ms']:.1f} ms",
            f"{row['error']:+.1%}",
            f"{row['charged']} of {row['stragglers']}" if row["injected"] else "",
            f"{max(abs(each['difference_s']) for each in row['injected']) * 1e3:.1f} ms" if row["injected"] else "",
        )
        for row in rows
        if "schedule" in row
    ]
    return [*table(headings, cells), "", plans_sentence(rows), *_operations(rows)]


def _operations(rows: Rows) -> list[str]:
    """Return the lines on the operations of undisturbed runs, if they were recorded."""
    cells = [
        (row["schedule"], name, f"{simulated_ms:.2f} ms", f"{measured_ms:.2f} ms")
        for row in rows
        for name, (simulated_ms, measured_ms) in row.get("operations", {}).items()
    ]
    if not cells:
        return []
    said = "What the operations of a step take on a rank, without stragglers:"
    return ["", said, "", *table(("schedule", "operation", "simulated", "measured"), cells)]


def plans_sentence(rows: Rows) -> str:
    """Return errors, order and stragglers in a sentence."""
    found, orders = [row for row in rows if "schedule" in row], [row for row in rows if "clear_pairs" in row]
    errors = [row["error"] for row in found]
    right, clear = (sum(row[name] for row in orders) for name in ("right_pairs", "clear_pairs"))
    charged, late = (sum(row[name] for row in found) for name in ("charged", "stragglers"))
    return (
        f"Makespans: error median {median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}; of {clear} pairs "
        f"of schedules that differ by more than 5 %, {right} are in order; {charged} of {late} stragglers are charged."
    )


def _makespans(rows: Rows, groups: Mapping[str, str]) -> list[str]:
    """Return the table of simulated and measured makespans.

    Args:
        rows: Of runs that were kept.
        groups: Heading -> key of the rows, for the first columns.
    """
    headings = (*groups, "schedule", "simulated", "measured", "error", "operation furthest off", "waiting")
    cells = []
    for row in rows:
        name, error = furthest_off(row)
        cells.append(
            (
                *(row[key] for key in groups.values()),
                row["schedule"],
                f"{row['simulated_ms']:.2f} ms",
                f"{row['measured_ms']:.2f} ms",
                f"{row['error']:+.1%}",
                f"{name} {error:+.0%}" if name else "",
                "" if row["overlap"] is None else f"{row['overlap']:.0%}",
            )
        )
    return table(headings, cells)


def _errors(rows: Rows) -> str:
    """Return the errors of makespans in a few words."""
    errors = [row["error"] for row in rows]
    return f"error median {median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}"


def alone(rows: Rows) -> list[str]:
    """Makespans of one rank alone."""
    groups = {"model": "model", "batch": "batch_size", "precision": "precision"}
    return [*_makespans(rows, groups), "", f"{alone_sentence(rows)}."]


def alone_sentence(rows: Rows) -> str:
    """Return the errors of one rank alone, which the tables of trust repeat."""
    return f"{len(rows)} makespans, {_errors(rows)}"


def peers(rows: Rows) -> list[str]:
    """Makespans of one real rank among simulated ones."""
    groups = {"ranks": "ranks", "trouble": "trouble", "channels": "channels"}
    return [*_makespans(rows, groups), "", f"{peers_sentence(rows)}."]


def peers_sentence(rows: Rows) -> str:
    """Return the errors of one real rank by the size of its job, which the tables of trust repeat."""
    sizes = sorted({row["ranks"] for row in rows if row["channels"]})
    of_sizes = ((size, [row for row in rows if row["channels"] and row["ranks"] == size]) for size in sizes)
    return "; ".join(f"in a job of {size}: {len(found)} makespans, {_errors(found)}" for size, found in of_sizes)


def nccl(rows: Rows) -> list[str]:
    """Values, makespans and a killed rank on several GPUs."""
    groups = {"ranks": "ranks", "model": "model", "trouble": "trouble"}
    found = [row for row in rows if row["what"] == "plan"]
    lines = _values(rows)
    for row in (row for row in rows if row["what"] == "killed"):
        was = "was named" if row["outcome"] == "passed" else "was NOT named"
        lines.append(f"* A killed rank {was} by {row['named_by']} of {row['ranks'] - 1}, in {row['seconds']} s.")
    return [*lines, "", *_makespans(found, groups), "", f"{nccl_sentence(rows)}."] if found else lines


def nccl_sentence(rows: Rows) -> str:
    """Return the errors of several GPUs, which the tables of trust repeat."""
    found, orders = ([row for row in rows if row["what"] == what] for what in ("plan", "order"))
    if not found:
        return "no makespans"
    right, clear = (sum(row[name] for row in orders) for name in ("right_pairs", "clear_pairs"))
    charged, late = (sum(row[name] for row in found) for name in ("charged", "stragglers"))
    return (
        f"{len(found)} makespans of {found[0]['ranks']} GPUs, {_errors(found)}; {right} of {clear} pairs of schedules "
        f"are in order; {charged} of {late} stragglers are charged"
    )


def shared_gpu(rows: Rows) -> list[str]:
    """Values of ranks that share a GPU over NCCL."""
    return _values(rows)


def _values(rows: Rows) -> list[str]:
    """Return whether the values of two backends are equal."""
    found = [row for row in rows if row["what"] == "values"]
    lines = []
    if found:
        n_passed = sum(row["outcome"] == "passed" for row in found)
        of = f"{n_passed} of {len(found)} schedules, {found[0]['ranks']} ranks"
        lines.append(f"* Parameters over NCCL and over gloo are equal to the last bit: {of}.")
    failed = [row for row in found if row["outcome"] == "failed"]
    return lines + [f"* DIFFERENT: {row['schedule']}: {row['equal']} of {row['tensors']} are equal" for row in failed]


def sharding(rows: Rows) -> list[str]:
    """Memory of sharded plans."""
    headings = ("schedule", "column `memory`", "allocated", "error", "all buffers")
    cells = [
        (
            row["schedule"],
            f"{row['column_MB']:,.1f} MB",
            f"{row['allocated_MB']:,.1f} MB",
            f"{row['error']:+.1%}",
            f"{row['all_buffers_MB']:,.1f} MB",
        )
        for row in rows
    ]
    return table(headings, cells)


def selection(rows: Rows) -> list[str]:
    """Times, shares of the floor, recall and invariants."""
    headings = ("elements", "type", "density", "method", "time", "share of the floor", "recall", "k, residual")
    cells = [
        (
            f"2^{row['log2_size']}",
            row["dtype"],
            row["density"],
            row["method"],
            f"{row['ms']:.3f} ms",
            f"{row['share_of_floor']:.0%}",
            f"{row['recall']:.4f}" if "recall" in row else "",
            _kept(row),
        )
        for row in rows
        if "method" in row
    ]
    (copy_Bps,) = (row["copy_Bps"] for row in rows if "copy_Bps" in row)
    said = f"A copy reads and writes {copy_Bps / 1e9:,.0f} GB/s."
    return [said, "", *table(headings, cells), *_recorded(rows), *_kernels(rows)]


def _recorded(rows: Rows) -> list[str]:
    """Return the lines on selections performed as CUDA graphs, if they were measured."""
    cells = [
        (f"2^{row['recorded_log2_size']}", f"{row['kernels_ms']:.3f} ms", f"{row['torch_ms']:.3f} ms")
        for row in rows
        if "recorded_log2_size" in row
    ]
    if not cells:
        return []
    (kernels_from,) = (row["kernels_from"] for row in rows if "kernels_from" in row)
    said = "With the residual, as a CUDA graph, 1 % of float32. MSTopK by kernels is faster from "
    said += f"{kernels_from:,} elements on:"
    return ["", said, "", *table(("elements", "by kernels", "by `torch.topk`"), cells)]


def _kernels(rows: Rows) -> list[str]:
    """Return the lines on the time of each kernel, if it was profiled."""
    found = [row for row in rows if "kernel" in row]
    if not found:
        return []
    first = found[0]
    of = f"float32 of 2^{first['log2_size']} elements, density {first['density']}"
    cells: list[tuple[object, ...]] = []
    for method in dict.fromkeys(row["kernel_of"] for row in found):
        ours = [row for row in found if row["kernel_of"] == method and row["kernel"].startswith("_")]
        others = [row for row in found if row["kernel_of"] == method and row not in ours]
        cells += [(method, f"`{row['kernel']}`", row["calls"], f"{row['ms']:.3f} ms") for row in ours]
        n_calls = sum(row["calls"] for row in others)
        cells.append((method, "those of torch", n_calls, f"{sum(row['ms'] for row in others):.3f} ms"))
    return ["", f"Kernels, {of}:", "", *table(("method", "kernel", "calls", "time"), cells)]


def _kept(row: Mapping[str, Any]) -> str:
    if "exactly_k" not in row:
        return ""
    broken = [name for name in ("exactly_k", "residual_conserved") if not row[name]]
    return f"BROKEN: {', '.join(broken)}" if broken else "hold"


def single(rows: Rows) -> list[str]:
    """Values and overhead."""
    lines = []
    for row in rows:
        match row["what"]:
            case "values":
                lines.append(
                    f"* Parameters of {row['model']} after {row['steps']} steps differ by at most "
                    f"{row['largest_difference']:g} from those with DistributedDataParallel."
                )
            case "overhead":
                lines.append(
                    f"* A step of {row['model']}, batch {row['batch_size']}, takes {row['simdist_ms']:.2f} ms with "
                    f"`real.wrap` and {row['ddp_ms']:.2f} ms with DistributedDataParallel."
                )
            case _:
                whole = "every operation ran" if row["every_operation_ran"] else "some operations did NOT run"
                lines.append(
                    f"* The plan of {row['model']}, batch {row['batch_size']}, performed by `python -m real`: "
                    f"{row['step_ms']:.2f} ms a step; {whole}."
                )
    return lines


def profiled(rows: Rows) -> list[str]:
    """Planted stragglers and those that were named, and the step."""
    planted = [row for row in rows if "planted_ms" in row]
    cells = [
        (row["rank"], row["step"], f"{row['planted_ms']:.0f} ms", _number(row["named_ms"], 1) + " ms")
        for row in planted
    ]
    lines = table(("rank", "step", "planted", "named"), cells)
    for row in rows:
        if "imported_ms" in row:
            lines += [
                "",
                f"A step took {row['step_ms']:.1f} ms. The traces say {row['imported_ms']:.1f} ms. The scenario made "
                f"of them takes {row['reproduced_ms']:.1f} ms. Named and not planted: "
                f"{len(row['named_and_not_planted'])}.",
            ]
    return lines


def delays(rows: Rows) -> list[str]:
    """Differences of delays, by their size."""
    cells = []
    for low, high in ((0.0, 1.0), (1.0, 10.0), (10.0, float("inf"))):
        found = [row["measured_ms"] - row["injected_ms"] for row in rows if low <= row["injected_ms"] < high]
        if found:
            size = f"{low:g} to {high:g} ms" if high < float("inf") else f"{low:g} ms and more"
            cells.append((size, len(found), f"{median(found):+.3f} ms", f"{max(found, key=abs):+.3f} ms"))
    return table(("injected", "delays", "median difference", "largest difference"), cells)


def steps(rows: Rows) -> list[str]:
    """Curves of the time per sample."""
    headings = ("model", "precision", "batch", "step", "per sample", "by the presets", "error", "by two sizes", "error")
    cells = []
    for row in rows:
        measured = row["step_ms"]
        about = (row["model"], row["precision"], row["batch_size"])
        if measured is None:
            cells.append((*about, row["note"], *("",) * 5))
            continue
        cells.append(
            (
                *about,
                f"{measured:.2f} ms",
                f"{row['ms_per_sample']:.3f} ms",
                *_predicted(row["predicted_ms"], measured),
                *_predicted(row["two_sizes_ms"], measured),
            )
        )
    compared = [row for row in rows if row.get("two_sizes_ms") is not None]
    errors = [{"error": row["two_sizes_ms"] / row["step_ms"] - 1} for row in compared]
    said = ["", f"By two sizes: {len(errors)} steps, {_errors(errors)}."] if errors else []
    return [*table(headings, cells), *said]


def _predicted(predicted_ms: float | None, measured_ms: float) -> tuple[str, str]:
    """Return the cells of a prediction and its error."""
    if predicted_ms is None:
        return "-", "-"
    return f"{predicted_ms:.2f} ms", f"{predicted_ms / measured_ms - 1:+.0%}"


PARTS = {
    "alone": alone,
    "peers": peers,
    "nccl": nccl,
    "shared_gpu": shared_gpu,
    "suite": suite,
    "plans": plans,
    "sharding": sharding,
    "selection": selection,
    "single": single,
    "profiled": profiled,
    "delays": delays,
    "steps": steps,
}
#: Part -> what its times compare, and the sentence of its errors: what the tables of trust repeat.
TRUST = {
    "alone": ("one rank alone", alone_sentence),
    "peers": ("one real rank among simulated ones", peers_sentence),
    "nccl": ("a rank on each of several GPUs, over NCCL", nccl_sentence),
}
NEVER = "never"


def trust(folder: Path = RESULTS) -> dict[str, str]:
    """Return what was compared -> its errors on the newest GPU; `never` if it was not."""
    found: dict[str, str] = {}
    for name, (what, sentence) in TRUST.items():
        results = newest(name, folder)
        said = None if results is None else sentence(results[1]["rows"])
        found[what] = NEVER if results is None else f"{results[0]['device']}: {said}"
    return found


def _limits(name: str, part: Mapping[str, Any]) -> list[str]:
    """Return the lines on the limits of a part."""
    found = [f"* {each}" for each in verdicts(name, part["rows"])]
    return [*found, ""] if found else []


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """Return name -> table, of all parts, and of `summary`, which the tables of trust repeat."""
    found: dict[str, str] = {}
    for name, make in PARTS.items():
        results = newest(name, folder)
        lines = (
            [NOTHING]
            if results is None
            else [about(*results), "", *_limits(name, results[1]), *make(results[1]["rows"])]
        )
        found[name] = "\n".join(lines)
    found["software"] = "\n".join(_software(folder))
    found["summary"] = "\n".join(table(("compared with a GPU", "errors"), tuple(trust(folder).items())))
    return found


def again(folder: Path = RESULTS) -> None:
    """Predict all recorded results again with today's model, and print what lacks."""
    sys.path.insert(0, str(HERE))
    import kept  # of this folder

    for path in sorted(folder.glob("*.json")):
        n_rows, lacks = kept.predict_again(path)
        print("\n".join([f"{path.name}: {n_rows} rows are predicted again", *lacks]))


if __name__ == "__main__":
    if "--again" in sys.argv:
        sys.argv.remove("--again")
        again()
    page_command(str(__doc__), HERE / "README.md", tables)
