"""Trace files of the profiler are read whole, in bounded memory, and what is wrong with one is said."""

import gzip
import json
import math
import os
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
from msgspec import Raw

from simdist.errors import TraceError
from simdist.profiles import find_traces, profile_all
from simdist.profiles.kineto.events import Args, Event, args_of
from simdist.profiles.kineto.reading import TraceFile
from simdist.profiles.steps.model import RankProfile


def operator(name="aten::mm", *, at=0.0, **others):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": at, "dur": 1.5, **others}


def operators(count):
    return [operator(f"op {number}", at=10.0 * number, args={"External id": number}) for number in range(count)]


def trace(events, **metadata):
    return {"schemaVersion": 1, **metadata, "traceEvents": events, "traceName": "here.json"}


def pretty(document):
    """Lay a trace out as the profiler does."""
    return json.dumps(document, indent=2).encode()


def compact(document):
    return json.dumps(document).encode()


def read(path, **options):
    """Return all events of a file, and its header."""
    file = TraceFile(path, **options)
    events = [event for batch in file.batches() for event in batch]
    return events, file.header()


def read_bytes(folder, content, *, name="trace.json", **options):
    path = folder / name
    path.write_bytes(content)
    return read(path, **options)


def names(events):
    return [event.name for event in events]


NAMES = [f"op {number}" for number in range(5)]

# Sizes that are read in one go, and sizes that are put together from many pieces.
each_chunk = pytest.mark.parametrize("chunk_nbytes", [1, 7, 100, 1 << 20])

AWKWARD = [
    operator("}, {"),
    operator('}, {"ph": "X"}, {'),
    operator("]}", at="12.25"),
    operator("\\\\"),
    operator("\\", args={"list": [{"ph": 1}, {"ph": 2}, {"a": [{}, {}]}], "text": '"},{"ph":"'}),
    operator("häß→\U0001f600"),
    operator("", tid="stream 7", pid="0"),
    {"ph": "X", "cat": "cpu_op", "name": "no duration", "ts": 3},
    operator("\n\t\x01"),
    operator("nested", args={"nested": {"deep": [[[1]], {"name": "}, {"}]}}),
    operator("last", args={"list": [{"ph": 1}, {"ph": 2}]}),  # no event ends where two seem to meet
]


@each_chunk
@pytest.mark.parametrize("layout", [pretty, compact, lambda document: json.dumps(document, sort_keys=True).encode()])
def test_events_are_the_same_however_the_text_is_laid_out_and_cut(tmp_path, layout, chunk_nbytes):
    document = trace(AWKWARD) | {"distributedInfo": {"rank": 6}}  # behind the events
    events, header = read_bytes(tmp_path, layout(document), chunk_nbytes=chunk_nbytes)
    assert names(events) == [each["name"] for each in AWKWARD]
    assert [bytes(event.args) and json.loads(bytes(event.args)) for event in events] == [
        each.get("args", b"") for each in AWKWARD
    ]
    assert [event.ts_us for event in events] == [float(each["ts"]) for each in AWKWARD]
    assert (header.n_events, header.notes, header.rank) == (len(AWKWARD), (), 6)


@pytest.mark.parametrize(
    "content",
    [
        compact(operators(5)),
        b"\xef\xbb\xbf" + pretty(trace(operators(5))),
        pretty(trace(operators(5))).replace(b"\n", b"\r\n"),
        gzip.compress(pretty(trace(operators(5)))),
        b"\n\n  " + compact(trace(operators(5))) + b"\n\n",
        compact(trace(operators(5))).replace(b"}}]", b"}},]"),
        compact({"traceEvents": operators(5), "traceName": "fit-[Strategy]Single], {.json"}),
        compact({"traceEvents": operators(5), "deviceProperties": [{"id": 0}, {"id": 1, "name": "}]"}]}),
    ],
    ids=["list", "byte-order-mark", "crlf", "gzip", "spaces", "last-comma", "brackets-in-name", "objects-behind"],
)
@each_chunk
def test_trace_may_be_written_in_other_ways(tmp_path, content, chunk_nbytes):
    events, header = read_bytes(tmp_path, content, chunk_nbytes=chunk_nbytes)
    assert (names(events), header.notes) == (NAMES, ())


def damaged(old, new, *, count=5, layout=pretty):
    text = layout(trace(operators(count), host_name="node1"))
    assert old in text
    return text.replace(old, new, 1)


WHOLE = pretty(trace(operators(5)))
PACKED = gzip.compress(compact(trace([operator(Random(number).randbytes(50).hex()) for number in range(5000)])))

TOLERATED = {
    "inf": (damaged(b'id": 2', b'id": 2, "GB/s": inf'), NAMES, ()),
    "minus infinity": (damaged(b'id": 2', b'id": 2, "x": [1, -Infinity, NaN, nan]'), NAMES, ()),
    "no value": (damaged(b'id": 2', b'id": 2, "Process Group Description": , "x": '), NAMES, ()),
    "value without quotes": (damaged(b'id": 2', b'id": 2, "Process Group Description": default_pg'), NAMES, ()),
    "control character": (damaged(b"op 2", b"op\x022"), [*NAMES[:2], "op 2", *NAMES[3:]], ()),
    "line break in a name": (damaged(b"op 2", b"op\n2"), NAMES, ()),
    "no UTF-8": (damaged(b"op 2", b"op \xff"), [*NAMES[:2], "op \ufffd", *NAMES[3:]], ()),
    "lone backslash": (damaged(b"op 2", rb"C:\User\new"), [*NAMES[:2], "C:\\User\new", *NAMES[3:]], ()),
    "backslash before a quote": (damaged(b"op 2", b"C:\\dir\\"), [*NAMES[:2], *NAMES[3:]], ("1 events are damaged",)),
    "time is null": (damaged(b'"ts": 20.0', b'"ts": null'), [*NAMES[:2], *NAMES[3:]], ("1 events are damaged",)),
    "time is no number": (damaged(b'"ts": 20.0', b'"ts": "soon"'), [*NAMES[:2], *NAMES[3:]], ("1 events are damaged",)),
    "no time": (damaged(b'"ts": 20.0', b'"t": 0'), [*NAMES[:2], *NAMES[3:]], ("1 events have no start",)),
    "5,000 digits": (
        damaged(b'"dur": 1.5', b'"dur": ' + b"9" * 5000),
        NAMES[1:],
        ("1 events are damaged",),
    ),
    "negative duration": (damaged(b'"dur": 1.5', b'"dur": -1'), NAMES[1:], ("1 events have no start, or no possible",)),
    "absurd duration": (
        damaged(b'"dur": 1.5', b'"dur": 1e300'),
        NAMES[1:],
        ("1 events have no start, or no possible",),
    ),
    "absurd start": (damaged(b'"ts": 20.0', b'"ts": 1e300'), [*NAMES[:2], *NAMES[3:]], ("1 events have no start",)),
    "endless duration": (damaged(b'"dur": 1.5', b'"dur": "inf"'), NAMES[1:], ("1 events have no start",)),
    "no object": (damaged(b'"traceEvents": [', b'"traceEvents": [null, 3, [],'), NAMES, ("3 events are damaged",)),
    "brace too many": (damaged(b"}\n    },", b"}\n    }},"), NAMES, ("1 events are damaged",)),
    "bracket too many": (damaged(b"}\n    },", b"}\n    }],"), NAMES, ("1 events are damaged",)),
    "two commas": (damaged(b"}\n    },", b"}\n    },,"), NAMES, ()),
    "half an event": (damaged(b'"ts": 20.0,', b'"ts":'), [*NAMES[:2], *NAMES[3:]], ("1 events are damaged",)),
    "cut off in an event": (WHOLE[: WHOLE.index(b"op 4") + 1], NAMES[:4], ("ends early: what follows its first 4 ",)),
    "cut off in a time": (WHOLE[: WHOLE.index(b"40.0") + 1], NAMES[:4], ("ends early: what follows its first 4 ",)),
    "cut off after an event": (WHOLE[: WHOLE.rindex(b"]")], NAMES, ("what follows its first 5 events is missing",)),
    "no closing brace": (WHOLE[: WHOLE.rindex(b"]") + 1], NAMES, ()),
    "rubbish behind": (WHOLE + b"GARBAGE\xff", NAMES, ("what follows the end of the trace was left out: 'GARB",)),
    "two traces": (WHOLE + WHOLE, NAMES, ("what follows the end of the trace was left out: '{",)),
    "list with rubbish behind": (compact(operators(5)) + b"oops", NAMES, ("behind the events is no JSON",)),
    "no JSON before": (damaged(b'"node1"', b'"node1" 7'), NAMES, ("what stands before the events is no JSON",)),
    "no JSON behind": (damaged(b'"here.json"', b'"here'), NAMES, ("what stands behind the events is no JSON",)),
    "gzip with rubbish behind": (gzip.compress(WHOLE) + b"GARBAGE", NAMES, ("compressed data are damaged: Not a gz",)),
    "gzip with another sum": (gzip.compress(WHOLE)[:-8] + bytes(8), NAMES, ("damaged: CRC check failed",)),
}


@pytest.mark.parametrize(("content", "expected", "notes"), TOLERATED.values(), ids=TOLERATED)
@each_chunk
def test_damage_costs_what_is_damaged_only_and_is_noted(tmp_path, content, expected, notes, chunk_nbytes):
    events, header = read_bytes(tmp_path, content, chunk_nbytes=chunk_nbytes)
    assert names(events) == expected
    assert len(header.notes) == len(notes)
    for note, part in zip(header.notes, notes, strict=True):
        assert part in note


@pytest.mark.parametrize(
    "damage", [lambda packed: packed[: len(packed) // 2], lambda packed: packed[:100_000] + b"\xff" * 9000]
)
def test_of_damaged_compressed_data_what_comes_before_is_read(tmp_path, damage):
    events, header = read_bytes(tmp_path, damage(PACKED), chunk_nbytes=10_000)
    assert 100 < len(events) < 4900
    assert len(set(names(events))) == len(events)
    assert header.notes[0].startswith("its compressed data ")
    assert header.notes[0].endswith(f": what follows its first {len(events):,} events is missing")


def zipped():
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            zipfile.ZipInfo("trace.json"), "{}"
        )  # of 1980: the time of day is among the bytes that are shown
    return file.getvalue()


NO_OPERATORS = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
OF_A_BROWSER = [{"ph": "X", "cat": "blink", "name": "paint", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]

USELESS = {
    "empty": (b"", "the file is empty"),
    "white space": (b" \n\n ", "nothing but white space"),
    "zip": (zipped(), "begins with b'PK"),
    "HTML": (b"<!DOCTYPE html><html>404</html>", "begins with b'<!DOCTYPE html>"),
    "text": (b"hello", "begins with b'hello'; a profiler trace is JSON, which begins with { or ["),
    "zeros": (bytes(10_000), "begins with b'\\x00"),
    "other JSON": (
        b'{"epoch": 3, "loss": [1, 2]}',
        "no list `traceEvents` within 28 bytes; a profiler trace has one. Found: `e",
    ),
    "no keys": (b"{}", "Found: no keys"),
    "events are no list": (b'{"traceEvents": {"ph": "X"}}', "has no list `traceEvents`"),
    "list of numbers": (b"[1, 2, 3]", "3 things that are no events"),
    "no events": (compact(trace([])), "holds 0 events, but none of operators or kernels"),
    "metadata only": (compact(trace(NO_OPERATORS)), "holds 1 events, but none of operators or kernels"),
    "Python only": (compact(trace([operator(cat="python_function")])), "holds 1 events, but none of operators"),
    "of a browser": (compact(trace(OF_A_BROWSER)), "not of the PyTorch profiler: its categories are `blink`"),
    "of another device": (
        compact(trace([operator(), operator(cat="mtia_runtime")])),
        "of a device that is not supported: MTIA; only jobs on CPUs and on GPUs of NVIDIA and AMD are read",
    ),
    "cut off before the events": (b'{\n  "schemaVersion": 1,\n  "deviceProp', "Found: `schemaVersion`"),
    "cut off in the first event": (WHOLE[: WHOLE.index(b"op 0")], "holds 0 events, but none of operators"),
    "gzip of nothing": (gzip.compress(b""), "the file is empty"),
    "gzip cut off at once": (PACKED[:12], "its compressed data end early"),
    "gzip in gzip": (gzip.compress(gzip.compress(WHOLE, mtime=0)), "begins with b'\\x1f\\x8b"),
    "endless nesting": (b"[" * 100_000, "1 things that are no events"),
    "nested without end": (b'{"traceEvents": [' + b'{"ph":' * 100_000, "things that are no events"),
}


@pytest.mark.parametrize(("content", "message"), USELESS.values(), ids=USELESS)
@pytest.mark.parametrize("chunk_nbytes", [100, 1 << 20])
def test_file_of_which_nothing_can_be_read_is_refused_with_its_name_and_the_reason(
    tmp_path, content, message, chunk_nbytes
):
    with pytest.raises(TraceError) as caught:
        read_bytes(tmp_path, content, chunk_nbytes=chunk_nbytes)
    assert str(caught.value).startswith(f"{tmp_path / 'trace.json'}: ")
    assert message in str(caught.value)


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(compact(trace(operators(20_000))))
    assert path.stat().st_size > 2_000_000
    tracemalloc.start()
    try:
        n_events = sum(len(batch) for batch in TraceFile(path, chunk_nbytes=20_000).batches())
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_events == 20_000
    assert peak_nbytes < 500_000


def test_event_of_absurd_size_is_refused_before_memory_is_full(tmp_path):
    content = compact(trace([*operators(3), operator("x" * 20_000)]))
    with pytest.raises(TraceError, match="event 3 takes more than 10,000 bytes"):
        read_bytes(tmp_path, content, chunk_nbytes=1000, event_nbytes=10_000)


def test_what_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    with pytest.raises(TraceError, match=r"gone\.json: cannot be read: No such file"):
        read(tmp_path / "gone.json")
    os.mkfifo(tmp_path / "pipe.json")
    for name, reason in {"pipe.json": "it is a pipe: give a regular file", ".": "Is a directory"}.items():
        with pytest.raises(TraceError, match=f"cannot be read: {reason}"):
            read(tmp_path / name)


def test_header_is_not_given_out_before_the_events_were_read(tmp_path):
    (tmp_path / "trace.json").write_bytes(WHOLE)
    with pytest.raises(TraceError, match="the header is known after the last of the events"):
        TraceFile(tmp_path / "trace.json").header()


def test_arrows_and_pythons_calls_are_left_out(tmp_path):
    others = [operator(cat="python_function"), operator(cat="ac2g"), {"ph": "s", "id": 7, "cat": "x", "ts": 1}]
    content = compact(trace([*operators(5), *others]))
    events, header = read_bytes(tmp_path, content)
    assert (names(events), header.n_events) == (NAMES, 8)


def test_categories_of_older_versions_are_translated(tmp_path):
    older = [operator(cat=cat) for cat in ("Operator", "Kernel", "Memcpy", "Runtime", "other")]
    events, _ = read_bytes(tmp_path, compact(trace(older)))
    assert [event.cat for event in events] == ["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "other"]


@pytest.mark.parametrize("ts", [4449241571294.327, "4449241571294.327", 1790857026123456.25, 1790857026123456])
def test_large_times_keep_less_than_a_microsecond(tmp_path, ts):
    (event,), _ = read_bytes(tmp_path, compact(trace([operator(at=ts)])))
    assert abs(event.ts_us - float(ts)) < 0.25


def test_header_tells_the_job(tmp_path):
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": 2, "ranks": [1, 0]}
    long = {"pg_name": "1", "pg_size": 4, "ranks": [0, 1]}
    metadata = {
        "distributedInfo": {"backend": "nccl", "rank": "1", "world_size": 2, "pg_config": [group, long]},
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}, {"id": 1}],
        "host_name": "node7",
    }
    for document in ({**metadata, "traceEvents": operators(1)}, {"traceEvents": operators(1), **metadata}):
        _, header = read_bytes(tmp_path, pretty(document))
        assert (header.rank, header.world_size, header.backend, header.hostname) == (1, 2, "nccl", "node7")
        assert header.groups == ((0, 1), None)
        assert header.gpus == {0: "NVIDIA A100", 1: ""}


def test_header_of_odd_types_tells_what_it_can(tmp_path):
    metadata = {"distributedInfo": {"rank": -1, "world_size": True, "pg_config": {"0": {"ranks": "all"}}}}
    _, header = read_bytes(tmp_path, compact(trace(operators(1), **metadata, host_name=None, deviceProperties="?")))
    assert (header.rank, header.world_size, header.hostname, header.gpus) == (None, None, None, {})
    assert header.groups == (None,)


@pytest.mark.parametrize(
    ("name", "rank", "file_host"),
    [
        ("rank3.json", 3, None),
        ("rank3_1.json", 3, None),
        ("trace_rank_12.json.gz", 12, None),
        ("rank-70.Mar_25_09_12_17.3354.pt.trace.json.gz", 70, None),
        ("step5-Rank007.json", 7, None),
        ("worker0.1234.pt.trace.json", 0, None),
        ("worker12.json", 12, None),
        ("node-a1_4711.1693918893000.pt.trace.json", None, "node-a1"),
        ("my_host_4711.1693918893000.pt.trace.json.gz", None, "my_host"),
        ("node1_4711.1693918893000123456.pt.trace.json", None, "node1"),
        ("node1.example.com_4711.pt.trace.json", None, None),
        ("run_3.12.pt.trace.json", None, None),
        ("job-worker-3_77.1693918893000.pt.trace.json", None, "job-worker-3"),  # a machine of several ranks, or rank 4
        ("frank3.json", None, None),
        ("local_rank3.json", None, None),
        ("rank1_rank2.json", None, None),
        ("trace.json", None, None),
    ],
)
def test_name_tells_the_rank_where_the_trace_does_not(tmp_path, name, rank, file_host):
    _, header = read_bytes(tmp_path, WHOLE, name=name)
    assert (header.rank, header.hostname, header.file_host) == (rank, None, file_host)


def test_trace_counts_where_the_name_says_another_rank(tmp_path):
    content = compact(trace(operators(1), distributedInfo={"rank": 2}))
    _, header = read_bytes(tmp_path, content, name="rank5.json")
    assert header.rank == 2
    assert header.notes == ("the name says rank 5, the trace says rank 2, which counts",)


def decoded(**args):
    return args_of(Event("X", args=Raw(json.dumps(args).encode())))


def test_arguments_of_a_collective_are_decoded():
    args = decoded(
        **{"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": "1000", "Group size": 4},
        **{"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[3, 1, 2, 0]", "correlation": 20},
    )
    assert (args.collective, args.in_nelems, args.out_nelems, args.group_size) == ("allreduce", 1000, 1000, 4)
    assert (args.dtype, args.ranks, args.correlation) == ("Float", (0, 1, 2, 3), 20)


@pytest.mark.parametrize("ranks", ["[0, 1, ..., 31]", "", "[]", [], "all", "[0, x]"])
def test_ranks_that_are_not_all_told_are_none(ranks):
    assert decoded(**{"Process Group Ranks": ranks}).ranks is None


def test_ranks_may_be_a_list():
    assert decoded(**{"Process Group Ranks": [2, 0]}).ranks == (0, 2)


def test_shapes_are_decoded_also_of_lists_of_tensors():
    args = decoded(**{"Input Dims": [[8, 700], [], [[2, 3], [4]]], "Input type": ["float", "", "TensorList"]})
    assert args.input_dims == [[8, 700], [], [[2, 3], [4]]]
    assert args.input_types == ["float", "", "TensorList"]


def test_argument_of_an_odd_type_costs_no_other():
    args = decoded(
        **{"Group size": [1], "dtype": "Float", "Input Dims": "[[1]...", "correlation": 2.5, "In msg nelems": "7"}
    )
    assert args == Args(dtype="Float", in_nelems=7)


def test_arguments_that_older_versions_name_otherwise_are_found():
    args = decoded(**{"Collective name": "allreduce", "Input dims": [[1, 2]], "In msg size": 10, "Out msg size": 20})
    assert (args.input_dims, args.in_nelems, args.out_nelems) == ([[1, 2]], 10, 20)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'"x"', b"{broken", b'{"a": "\xff"}'])
def test_arguments_that_tell_nothing_are_all_unknown(text):
    assert args_of(Event("X", args=Raw(text))) == Args()


def touch(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}")


def found(folder, *places):
    return [str(path.relative_to(folder)) for path in find_traces([folder / place for place in places])]


def test_traces_of_a_folder_are_found_in_the_order_of_their_numbers(tmp_path):
    touch(
        tmp_path, "rank10.json", "rank2.json.gz", "rank1.pt.trace.json", "notes.txt", ".hidden.json", "deep/rank3.json"
    )
    assert found(tmp_path, ".") == ["rank1.pt.trace.json", "rank2.json.gz", "rank10.json"]


def test_folders_within_are_searched_if_nothing_is_directly_in_one(tmp_path):
    touch(tmp_path, "node2/rank1.json", "node1/rank0.json", "readme.txt")
    assert found(tmp_path, ".") == ["node1/rank0.json", "node2/rank1.json"]


def test_patterns_and_names_are_found_once_each(tmp_path):
    touch(tmp_path, "rank0.json", "rank1.json", "fit-[Strategy].json", "a/rank2.json", "b/rank3.json")
    assert found(tmp_path, "rank*.json", "rank0.json", ".") == ["rank0.json", "rank1.json", "fit-[Strategy].json"]
    assert found(tmp_path, "fit-[Strategy].json") == ["fit-[Strategy].json"]
    assert found(tmp_path, "[ab]") == ["a/rank2.json", "b/rank3.json"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("gone", "gone: no such file or folder"),
        ("gone*.json", r"gone\*.json: no file has such a name"),
        ("empty", "empty: holds no file whose name ends in .json or .json.gz"),
    ],
)
def test_place_without_traces_is_refused(tmp_path, place, message):
    (tmp_path / "empty").mkdir()
    touch(tmp_path, "rank0.json")
    with pytest.raises(TraceError, match=message):
        find_traces([tmp_path / "rank0.json", tmp_path / place])


def test_no_place_is_refused():
    with pytest.raises(TraceError, match="name files, folders or patterns"):
        find_traces([])


def shallow_profile(path: Path) -> RankProfile:
    """Stand in for `profile_rank`."""
    if path.name == "deadly.json":
        os._exit(9)
    _, header = read(path)
    return RankProfile(
        path=str(path),
        rank=header.rank,
        world_size=None,
        hostname=None,
        local_gpu=None,
        device="cpu",
        device_name="",
        backend="",
        steps=(),
        gradients=(),
        dtype="",
        batch_size=None,
        host_waits=True,
        notes=(str(os.getpid()),),
    )


@pytest.mark.parametrize("n_workers", [1, 2])
def test_file_that_cannot_be_read_costs_no_other(tmp_path, n_workers):
    contents = {f"rank{rank}.json": WHOLE for rank in (3, 1, 2)} | {"rank0.json": b"", "rank4.json": b"<html>"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    told = []
    outcomes = profile_all(
        [tmp_path / name for name in contents],
        reading=shallow_profile,
        n_workers=n_workers,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [outcome.rank for outcome in outcomes[:3]] == [3, 1, 2]
    assert [isinstance(outcome, TraceError) for outcome in outcomes] == [False] * 3 + [True] * 2
    assert told == [(done, 5) for done in (1, 2, 3, 4, 5)]
    assert {outcome.notes == (str(os.getpid()),) for outcome in outcomes[:3]} == {n_workers == 1}


def test_process_that_dies_costs_the_file_that_it_read(tmp_path):
    paths = [tmp_path / name for name in ("rank0.json", "deadly.json", "rank1.json", "rank2.json")]
    for path in paths:
        path.write_bytes(WHOLE)
    first, dead, *others = profile_all(paths, reading=shallow_profile, n_workers=2)
    assert [first.rank, *(each.rank for each in others)] == [0, 1, 2]
    assert str(dead).startswith(f"{paths[1]}: the process that read it died")


def test_times_of_metadata_may_be_missing(tmp_path):
    events, header = read_bytes(tmp_path, compact(trace([*NO_OPERATORS, *operators(1)])))
    assert math.isnan(events[0].ts_us)
    assert (events[0].ph, json.loads(bytes(events[0].args))["name"]) == ("M", "python")
    assert header.notes == ()
