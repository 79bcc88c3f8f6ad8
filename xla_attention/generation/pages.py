"""Which pages of the cache are whose: a pool of page numbers, and the counts that show whether any leak."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Pages `0` to `num_pages - 1`, each free or handed out. The page last freed is the next to be used.

    Attributes:
        num_pages: in all.
        allocated, freed: pages handed out and given back, ever. Equal when nobody holds any.

    Raises:
        ValueError: there would be no page.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"pages: got {num_pages}, must be at least 1")
        self.num_pages = num_pages
        self.allocated = 0
        self.freed = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Pages that are free."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """So many pages, or None, and nothing changed, if fewer are free.

        Raises:
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count: got {count}, must not be negative")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        self.allocated += count
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back.

        Raises:
            ValueError: one of them is not handed out, or named twice; nothing is changed.
        """
        for place, page in enumerate(pages):
            if page not in self._held or page in pages[:place]:
                raise ValueError(f"pages: {page} is not handed out, so it cannot be given back")
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))
        self.freed += len(pages)
