"""Text with units: what is read, what is refused and with which advice, and that printing reads back."""

import contextlib
import math
import re
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PlainSerializer, ValidationError

from simdist.settings.base import FromFile, Settings, key_of
from simdist.settings.units import (
    BytesPerSecond,
    Nbytes,
    PerSecond,
    Seconds,
    format_Bps,
    format_nbytes,
    format_seconds,
    parse_Bps,
    parse_factor,
    parse_flops,
    parse_fraction,
    parse_nbytes,
    parse_per_s,
    parse_seconds,
    parse_whole,
)


class Transfer(Settings):
    latency_s: Seconds
    bandwidth_Bps: BytesPerSecond
    sample_nbytes: Nbytes = 0


class Server(Settings):
    operations_per_s: PerSecond = math.inf


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_seconds, "55 ms", 0.055),
        (parse_seconds, "1 s", 1.0),
        (parse_seconds, "2us", 2e-6),
        (parse_seconds, "3 \N{MICRO SIGN}s", 3e-6),
        (parse_seconds, "3 min", 180.0),
        (parse_seconds, 0, 0.0),
        (parse_nbytes, "45 MB", 45_000_000),
        (parse_nbytes, "44.7 MB", 44_700_000),
        (parse_nbytes, "1 MiB", 1_048_576),
        (parse_nbytes, "512 B", 512),
        (parse_Bps, "25 Gbit/s", 3.125e9),
        (parse_Bps, "1e3 MB/s", 1e9),
        (parse_Bps, "1 MiB/s", 1_048_576.0),
        (parse_Bps, "unlimited", math.inf),
        (parse_flops, "125 TFLOP/s", 1.25e14),
        (parse_fraction, "2%", 0.02),
        (parse_fraction, 0.02, 0.02),
        (parse_fraction, "29 %", 0.29),
        (parse_factor, 2, 2.0),
        (parse_whole, 1e3, 1000),
        (parse_per_s, 10_000, 10_000.0),
        (parse_per_s, 2.5, 2.5),
        (parse_per_s, "unlimited", math.inf),
    ],
)
def test_text_becomes_the_nearest_si_number(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_seconds, 5, "5: a time needs a unit: write e.g. 55 ms"),
        (parse_seconds, "5", "'5': a time needs a unit: write e.g. 55 ms"),
        (parse_seconds, "5 sec", "'5 sec': 'sec' is no unit of time: write 5 s"),
        (parse_seconds, "2 m", "'2 m': 'm' is no unit of time: write 2 min"),
        (parse_seconds, "5 MB", "'5 MB': that is a size, not a time: write e.g. 55 ms"),
        (parse_seconds, "-1 s", "'-1 s' is negative: write e.g. 55 ms"),
        (parse_seconds, "nan", "'nan' is not a time: write e.g. 55 ms"),
        (parse_seconds, "inf s", "'inf s' is not a time: write e.g. 55 ms"),
        (parse_seconds, "1e999 s", "'1e999 s' is too large a number"),
        (parse_seconds, None, "null is not a time: write e.g. 55 ms"),
        (parse_seconds, True, "true is not a time: write e.g. 55 ms"),
        (parse_nbytes, "45 Mbit", "'45 Mbit': sizes are in bytes, not bits: write e.g. 5.625 MB"),
        (parse_nbytes, "45 Mb", "'45 Mb': 'Mb' is no unit of size: write 45 MB"),
        (parse_nbytes, "1 KB", "'1 KB': 'KB' is no unit of size: write 1 kB"),
        (parse_nbytes, "1.5 B", "'1.5 B' is not a whole number of bytes: write e.g. 45 MB"),
        (parse_Bps, "25 Gbps", "'25 Gbps': 'Gbps' is no unit of bandwidth: write 25 Gbit/s"),
        (parse_Bps, "25 Gb/s", "'25 Gb/s': 'Gb/s' is no unit of bandwidth: write 25 Gbit/s"),
        (parse_Bps, "25 GBit", "'25 GBit': 'GBit' is no unit of bandwidth: write 25 Gbit/s"),
        (parse_Bps, "25 GBps", "'25 GBps': 'GBps' is no unit of bandwidth: write 25 GB/s"),
        (parse_Bps, "25 gbps", "'25 gbps': 'gbps' is no unit of bandwidth: write 25 Gbit/s or 25 GB/s"),
        (parse_Bps, "3 s", "'3 s': that is a time, not a bandwidth: write e.g. 25 Gbit/s"),
        (parse_flops, "125 TFLOPS", "'125 TFLOPS': 'TFLOPS' is no unit of computing speed: write 125 TFLOP/s"),
        (parse_fraction, 2, "2 is outside 0 to 1: write e.g. 2% or 0.02"),
        (parse_fraction, "2 s", "'2 s': 's' is no unit of a fraction: write e.g. 2% or 0.02"),
        (parse_fraction, math.nan, "nan is not a number: write a finite one"),
        (parse_factor, 0, "0 is not a factor: write a finite number above 0, e.g. 1.5"),
        (parse_factor, math.inf, "inf is not a factor: write a finite number above 0, e.g. 1.5"),
        (parse_factor, "2", "'2' is not a number: write a factor above 0, e.g. 1.5"),
        (parse_per_s, 0, "0 per second: write a number above 0, e.g. 10000, or unlimited"),
        (parse_per_s, math.nan, "nan is not a number: write a finite one"),
        (parse_per_s, "10 k", "'10 k' is not a number per second: write e.g. 10000, or unlimited"),
        (parse_whole, True, "true is not a whole number: write e.g. 8"),
        (parse_whole, "8", "'8' is not a whole number: write e.g. 8"),
        (parse_whole, 1.5, "1.5 is not a whole number: write e.g. 8"),
    ],
)
def test_wrong_value_is_named_with_the_right_form(parse, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(value)


def test_plain_numbers_are_si_in_python_only():
    assert Transfer(latency_s=1e-6, bandwidth_Bps=1e9).bandwidth_Bps == 1e9
    with pytest.raises(ValidationError, match="a time needs a unit"):
        Transfer.model_validate({"latency": 1e-6, "bandwidth": "1 GB/s"}, context=FromFile(Path()))


@pytest.mark.parametrize("latency_s", [-1.0, math.nan, math.inf])
def test_python_values_are_checked_too(latency_s):
    with pytest.raises(ValidationError, match="write a finite number, 0 or more"):
        Transfer(latency_s=latency_s, bandwidth_Bps=1e9)


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Transfer(latency_s=0, bandwidth_Bps=1).latency_s = 1


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("latency_s", "latency"),
        ("bandwidth_Bps", "bandwidth"),
        ("sample_nbytes", "sample_size"),
        ("peak_flops", "peak"),
        ("operations_per_s", "operations_per_s"),
        ("flops", "flops"),
        ("steps", "steps"),
    ],
)
def test_key_in_a_file_is_the_name_without_its_unit(name, key):
    assert key_of(name) == key


@pytest.mark.parametrize(("written", "rate"), [(10_000, 1e4), (2.5, 2.5), ("unlimited", math.inf)])
def test_numbers_per_second_need_no_unit_and_may_be_unlimited(written, rate):
    server = Server.model_validate({"operations_per_s": written}, context=FromFile(Path()))
    assert server == Server(operations_per_s=rate)
    assert Server.model_validate(server.model_dump(mode="json"), context=FromFile(Path())) == server


@given(
    latency_s=st.floats(0, 1e6),
    bandwidth_Bps=st.floats(0, 1e300, exclude_min=True) | st.just(math.inf),
    sample_nbytes=st.integers(0, 2**50),
)
def test_printed_settings_read_back_as_the_very_same_numbers(latency_s, bandwidth_Bps, sample_nbytes):
    transfer = Transfer(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps, sample_nbytes=sample_nbytes)
    assert Transfer.model_validate(transfer.model_dump(mode="json"), context=FromFile(Path())) == transfer


def test_bandwidth_of_0_would_never_finish():
    with pytest.raises(ValueError, match="0 would never finish: write a value above 0"):
        Transfer(latency_s=0.0, bandwidth_Bps=0.0)


def test_printed_settings_are_short():
    printed = Transfer(latency_s=5e-6, bandwidth_Bps=3.125e9, sample_nbytes=150_000).model_dump(mode="json")
    assert printed == {"latency": "5 us", "bandwidth": "25 Gbit/s", "sample_size": "150 kB"}


@given(st.text() | st.integers() | st.floats() | st.none() | st.booleans())
def test_any_value_is_read_or_refused_with_a_value_error(value):
    for parse in (
        parse_seconds,
        parse_nbytes,
        parse_Bps,
        parse_flops,
        parse_fraction,
        parse_factor,
        parse_per_s,
        parse_whole,
    ):
        with contextlib.suppress(ValueError):
            assert parse(value) >= 0 or parse is parse_whole


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_seconds(0.0554321), "55.4 ms"),
        (format_seconds(0), "0 s"),
        (format_seconds(1234.5), "1234 s"),
        (format_seconds(1e-12), "0.001 ns"),
        (format_nbytes(44_700_000), "44.7 MB"),
        (format_nbytes(512), "512 B"),
        (format_nbytes(0), "0 B"),
        (format_Bps(3.125e9), "3.12 GB/s"),
        (format_Bps(math.inf), "unlimited"),
    ],
)
def test_numbers_are_printed_for_people(printed, expected):
    assert printed == expected


def test_ctrl_c_while_settings_are_written_is_no_error_of_theirs() -> None:
    def interrupted(_: float) -> str:
        raise KeyboardInterrupt

    class Slow(Settings):
        latency: Annotated[float, PlainSerializer(interrupted)] = 1.0

    with pytest.raises(KeyboardInterrupt):
        Slow().model_dump(mode="json")
