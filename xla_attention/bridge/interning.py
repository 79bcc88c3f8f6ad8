"""Static arguments by number: an operator's schema carries numbers, not objects."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

_numbers: dict[Hashable, int] = {}
_values: list[Any] = []
_lock = threading.Lock()


def intern_static(value: Hashable) -> int:
    """The number of ``value`` in this process; equal values of one type share it."""
    key = (type(value), value)
    number = _numbers.get(key)
    if number is None:
        with _lock:
            number = _numbers.get(key)
            if number is None:
                number = len(_values)
                _values.append(value)
                _numbers[key] = number
    return number


def static_of(number: int) -> Any:
    """The value that ``intern_static`` gave ``number``."""
    return _values[number]
