"""One planted fault."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One replacement in one file, and who must notice."""

    name: str
    path: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # pytest node ids (and -k expressions) that must fail
