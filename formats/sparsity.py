"""How many weights of a linear are dropped, and in which pattern: the part of a scheme that pruning methods read."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError

UNSTRUCTURED = "unstructured"
PATTERNS: dict[str, tuple[int, int] | None] = {UNSTRUCTURED: None, "2:4": (2, 4), "4:8": (4, 8)}
"""Pattern -> (dropped, neighbours along the input), None where any weight may go."""
LEAST, MOST = 0.3, 0.7


@dataclass(frozen=True)
class Sparsity:
    """`ratio` is the share of weights that are dropped, on average over the layers; `pattern` a name of `PATTERNS`.

    Neither is needed to decode what was stored. Raises InputError for a ratio out of range, an unknown pattern, and a
    ratio that the pattern does not have.
    """

    ratio: float = 0.5
    pattern: str = UNSTRUCTURED

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise InputError(f"--pattern {self.pattern}", "is no pattern", "use one of " + ", ".join(PATTERNS))
        if not LEAST <= self.ratio <= MOST:
            fix = f"give a number from {LEAST} to {MOST}"
            raise InputError(f"--sparsity {self.ratio}", "is out of range", fix)
        group = self.group
        if group is not None and self.ratio != group[0] / group[1]:
            fix = f"leave --sparsity out, or use --pattern {UNSTRUCTURED}"
            raise InputError(f"--sparsity {self.ratio}", f"is not what pattern {self.pattern} drops", fix)

    @property
    def group(self) -> tuple[int, int] | None:
        """(dropped, neighbours) of a fixed pattern, None for the unstructured one."""
        return PATTERNS[self.pattern]

    def as_dict(self) -> dict[str, object]:
        """As `quantization_config` holds it."""
        return {"ratio": self.ratio, "pattern": self.pattern}
