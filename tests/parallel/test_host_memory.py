"""The process reuses freed memory instead of asking the kernel for it again."""

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


def page_faults(mode: str) -> int:
    """Number of page faults of three steps after warm-up, each of which fills 0.7 GiB."""
    result = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(result.stdout)


def test_freed_memory_is_not_faulted_in_again() -> None:
    assert page_faults("kept") < page_faults("returned") / 10
