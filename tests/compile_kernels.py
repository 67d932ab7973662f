"""Compile every Triton kernel of `real.kernels` for a GPU, which need not be there; print the sizes."""

from typing import Any

TYPES = {
    **dict.fromkeys(("maxima", "span_maxima", "scale", "threshold"), "*fp32"),
    **dict.fromkeys(("span_sums", "drawn"), "*fp64"),
    **dict.fromkeys(("times", "arrived", "ends", "lags", "durations"), "*i64"),
    **dict.fromkeys(("number", "width", "n_chunks", "n_places"), "i32"),
    **dict.fromkeys(("count", "n_tiles", "n_spans", "n_groups", "k", "span_size", "groups_in_span"), "i32"),
    **dict.fromkeys(("values", "added"), "*bf16"),
}  # whatever else there is points to int32
LARGEST = {"LARGEST": 2.0**126}
GROUP = {"GROUP": 64} | LARGEST
WHOLE = {"ROWS": 64} | GROUP
CHOSEN = {"AT_ONCE": 1024} | GROUP
CELLS = {"CELLS": 256, "SHIFT": 19}
STEPS = {"STEPS": 2**20}
SPANS = {"MAX_SPANS": 1024}
DIGITS = {"CELLS": 128, "BITS": 7, "N_DIGITS": 3, "CHUNK": 1024}


def main() -> None:
    """Compile and print."""
    # Here, because every file of this folder is imported to look for tests, and who imports triton first decides.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from real.kernels import triton_candidates, triton_dgc, triton_meeting, triton_mstopk

    target = GPUTarget("cuda", 90, 32)
    constants_of: dict[Any, dict[str, Any]] = {
        triton_mstopk._summarize: {"ADDS": True} | WHOLE,
        triton_mstopk._scale: {"DENSEST": 2.0**127} | STEPS | SPANS,
        triton_mstopk._count_maxima: {"CHUNK": 4096} | CELLS,
        triton_mstopk._choose: {"CHUNK": 1024} | CELLS | STEPS,
        triton_mstopk._collect: CHOSEN | CELLS | STEPS,
        triton_dgc._choose: WHOLE,
        triton_dgc._collect: CHOSEN,
        triton_dgc._take_all_if_few: {"CHUNK": 1024} | LARGEST | SPANS,
        triton_candidates._count_keys: {"DIGIT": 2} | DIGITS,
        triton_candidates._count_taken: DIGITS,
        triton_candidates._write: DIGITS | SPANS,
        triton_meeting._arrive: {},
        triton_meeting._hold: {"WIDTH": 4, "CHUNK": 4096, "NEVER": triton_meeting.NEVER, "MOST_LOOKS": 10**8},
    }

    for kernel, constants in constants_of.items():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else TYPES.get(name, "*i32") for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False, "num_warps": 8})
        print(f"{kernel.__module__}.{kernel.__name__}: {len(compiled.asm['cubin'])}")


if __name__ == "__main__":
    main()
