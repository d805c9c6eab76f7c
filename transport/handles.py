"""What everything that must be closed has in common."""

from abc import ABC, abstractmethod
from typing import Self


class Handle(ABC):
    """Closed at the end of a `with` block; `close` may be called again."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()
