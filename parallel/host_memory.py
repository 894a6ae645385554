"""Keep the memory that a step frees for the next one, on CPU.

glibc gives large blocks back to the kernel as soon as they are freed, and the next step faults them in again, page by
page: 200,000 faults and 0.4 s of system time in a 2 s step of the 14M model (docs/performance.md). On CUDA torch's own
allocator does what is asked for here.
"""

import ctypes
import logging

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LIMIT = 2**30
"""Bytes: smaller blocks come from the heap, and the heap's end is given back only beyond this much."""


def keep_freed_memory() -> None:
    """For the rest of the process. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_TRIM_THRESHOLD, LIMIT) and mallopt(M_MMAP_THRESHOLD, LIMIT)):
        log.info("the C library keeps no freed memory; steps on CPU will be slower")
