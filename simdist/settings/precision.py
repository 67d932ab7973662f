"""The precision of arithmetic, and what depends on it: the peak of a GPU, and the share of it that a model reaches.

Tensor cores raise the peak more than what a model reaches: ResNet-50 is at 57% of a V100's fp32 and at 24% of its fp16,
because the work that is no matrix product stays bound by memory. So both are stated by precision.
"""

import re
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, get_args

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from simdist.settings.base import Settings, shown
from simdist.settings.units import FlopsPerSecond, Whole

Precision: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16"]

_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# 3x3 Winograd convolution needs 2.25 times fewer multiplications, less its transforms (arXiv 1509.09308)
_MAX_SHARE = 2
_NUMBER = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", re.ASCII)

_ValueT = TypeVar("_ValueT")


def _parse_share(value: object) -> float:
    """Return a number above 0 and up to 2 written as 0.4 or "40%"; ValueError tells the right form."""
    share = value
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        share = float(Decimal(match[1]) / (100 if match[2] else 1))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= _MAX_SHARE:
        example = "write a number above 0 and up to 2, e.g. 40% or 0.4"
        raise ValueError(f"{shown(value)} is no share of the peak: {example}")
    return float(share)


_Share: TypeAlias = Annotated[float, BeforeValidator(_parse_share), Field(examples=["40%"])]


class PerPrecision(Settings, Generic[_ValueT]):
    """One value for each precision, or None; the base of `Peak` and `Utilization`."""

    fp32: _ValueT | None = None
    tf32: _ValueT | None = None
    fp16: _ValueT | None = None
    bf16: _ValueT | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, value: Any) -> Any:
        return {} if value is None else value

    def at(self, precision: Precision) -> _ValueT | None:
        """Return the value of a precision, None if it is not stated."""
        values: dict[str, _ValueT | None] = dict(self)
        return values[precision]

    @property
    def stated(self) -> tuple[Precision, ...]:
        """The precisions that have a value."""
        return tuple(precision for precision in _PRECISIONS if self.at(precision) is not None)


class Peak(PerPrecision[FlopsPerSecond]):
    """FLOP per second of dense arithmetic, as a datasheet states them. One value in place of a mapping is fp32.

    >>> Peak.model_validate("8.1 TFLOP/s").at("fp32"), Peak(fp32=8.1e12, fp16=65e12).stated
    (8100000000000.0, ('fp32', 'fp16'))
    """

    @model_validator(mode="before")
    @classmethod
    def _one_value_is_fp32(cls, value: Any) -> Any:
        return {"fp32": value} if isinstance(value, str | int | float) else value

    @model_serializer(mode="wrap", when_used="json")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> Any:
        stated = {precision: text for precision, text in handler(self).items() if text is not None}
        return stated["fp32"] if stated.keys() == {"fp32"} else stated


class Utilization(PerPrecision[_Share]):
    """Share of the peak that forward and backward pass reach. One share in place of a mapping is that of any precision.

    A share is above 0 and at most 2. It may exceed 1, because FLOPs are counted for direct convolution, and Winograd
    convolution needs fewer multiplications.

    >>> Utilization.model_validate("40%").at("tf32"), Utilization(fp32=1.35).stated
    (0.4, ('fp32',))
    """

    @model_validator(mode="before")
    @classmethod
    def _one_share_is_of_any_precision(cls, value: Any) -> Any:
        if not isinstance(value, str | int | float):
            return value
        return dict.fromkeys(_PRECISIONS, _parse_share(value))  # parsed here, so that a wrong one is reported once

    @model_serializer(mode="wrap", when_used="json")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> Any:
        stated = {precision: share for precision, share in handler(self).items() if share is not None}
        return self.fp32 if list(stated.values()) == [self.fp32] * len(_PRECISIONS) else stated


class MeasuredBatch(PerPrecision[Annotated[Whole, Field(ge=1)]]):
    """The batch size that times were measured at. One value in place of a mapping is that of any precision.

    >>> MeasuredBatch.model_validate(64).at("bf16"), MeasuredBatch(fp32=112).at("bf16")
    (64, None)
    """

    @model_validator(mode="before")
    @classmethod
    def _one_value_is_of_any_precision(cls, value: Any) -> Any:
        is_one = isinstance(value, int | str) and not isinstance(value, bool)
        return dict.fromkeys(cls.model_fields, value) if is_one else value

    @model_serializer(mode="wrap", when_used="json")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> Any:
        stated = {precision: size for precision, size in handler(self).items() if size is not None}
        is_one = len(stated) == len(type(self).model_fields) and len({*stated.values()}) == 1
        return self.fp32 if is_one else stated
