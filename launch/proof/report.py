"""The report of `keepstep prove`: what was run, which faults were injected, and which claims are true."""

import sys
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Check:
    """A claim, whether it is true, and the evidence."""

    claim: str
    passed: bool
    detail: str


@dataclass
class Report:
    """All that a proof found."""

    facts: dict[str, Any]
    """Recipe, engine, machine and versions."""
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Faults that were injected: `fault`, `rank`, `step`, `phase`."""
    checks: list[Check] = field(default_factory=list[Check])

    @property
    def passed(self) -> bool:
        """Whether all claims are true."""
        return all(check.passed for check in self.checks)

    def add(self, claim: str, passed: bool, detail: str) -> None:
        """Add a claim, and print it on standard error."""
        self.checks.append(Check(claim, passed, detail))
        print(f"{'passed' if passed else 'FAILED'}: {claim}: {detail}", file=sys.stderr, flush=True)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        checks = [asdict(check) for check in self.checks]
        return {"passed": self.passed, **self.facts, "faults": self.faults, "checks": checks}

    def as_text(self) -> str:
        """Return the report as one page of text."""
        lines = ["Keepstep: proof of exact resume", ""]
        lines += [f"{name:<12} {value}" for name, value in self.facts.items()]
        lines += ["", "Injected faults:"] if self.faults else []
        lines += [f"  {f['fault']} on rank {f['rank']} after step {f['step']}, in {f['phase']}" for f in self.faults]
        lines += ["", "Claims:"]
        for check in self.checks:
            lines += [f"  [{'passed' if check.passed else 'FAILED'}] {check.claim}", f"           {check.detail}"]
        return "\n".join([*lines, "", "PASSED" if self.passed else "FAILED", ""])
