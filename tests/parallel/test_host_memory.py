"""Memory that was freed is not asked of the kernel again."""

import subprocess
import sys

PROGRAM = """
import resource, sys, torch
from parallel.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    kept = torch.ones(2**22)
    for _ in range(8):
        kept = torch.cat((kept, torch.ones(2**22)))
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of three more steps that each fill 0.7 GiB."""
    result = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(result.stdout)


def test_freed_memory_is_not_faulted_in_again() -> None:
    assert faults("kept") < faults("given back") / 10
