"""A dictionary that forgets the least recently used when it holds too many bytes; safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Bounded:
    """`get(key, make)` gives the stored value or makes it. The newest value stays, whatever its size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._items: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key. Two threads that miss it at once both make it; one of the equal results stays."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key][0]
        value = make()
        with self._lock:
            if key not in self._items:
                size = size_of(value)
                self._items[key] = (value, size)
                self._bytes += size
                while self._bytes > self.max_bytes and len(self._items) > 1:
                    self._bytes -= self._items.popitem(last=False)[1][1]
            return self._items[key][0]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self._bytes


def size_of(value: Any) -> int:
    """Bytes of the arrays and tensors in a value, and a little for the value itself."""
    if hasattr(value, "nbytes"):
        return value.nbytes + 100
    if isinstance(value, str):
        return len(value) + 50
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    parts = parts or vars(value).values() if hasattr(value, "__dict__") else parts
    return 100 + sum(size_of(part) for part in parts)
