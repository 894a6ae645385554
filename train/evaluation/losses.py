"""The result of an evaluation: losses by data source, and what follows from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Losses:
    """Summed losses in nats, and what they are sums over, by data source (S)."""

    sums_S: tuple[float, ...]
    targets_S: tuple[int, ...]
    bytes_S: tuple[int, ...] | None = None
    """Bytes of text that the targets stand for; None if the tokenizer does not tell."""

    @property
    def mean(self) -> float:
        """Mean loss in nats per target."""
        return sum(self.sums_S) / sum(self.targets_S)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text: the loss in bits by the bytes of its targets. None if the bytes are not known."""
        return _bits_per_byte(sum(self.sums_S), sum(self.bytes_S or ()))

    def by_source(self, names: Sequence[str]) -> dict[str, "Losses"]:
        """Those of each source that has targets, by name."""
        return {
            name: Losses((loss,), (targets,), None if self.bytes_S is None else self.bytes_S[number : number + 1])
            for number, (name, loss, targets) in enumerate(zip(names, self.sums_S, self.targets_S, strict=True))
            if targets
        }

    def metrics(self, names: Sequence[str], prefix: str = "") -> dict[str, float]:
        """The values for metrics.jsonl: of all sources, and of each one if there are several."""
        found = self._metrics(prefix, "")
        for name, one in self.by_source(names).items() if len(self.sums_S) > 1 else ():
            found |= one._metrics(prefix, f"/{name}")
        return found

    def _metrics(self, prefix: str, suffix: str) -> dict[str, float]:
        values = {"loss": self.mean, "perplexity": perplexity(self.mean), "bits_per_byte": self.bits_per_byte}
        return {f"{prefix}validation_{name}{suffix}": value for name, value in values.items() if value is not None}


def perplexity(loss: float) -> float:
    """e to the loss in nats per target, as far as a float can hold it."""
    return math.exp(min(loss, 700.0))


def _bits_per_byte(nats: float, size: int) -> float | None:
    return nats / math.log(2) / size if size else None
