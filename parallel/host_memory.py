"""Reuse of the memory that a step frees by the next step, on CPU.

glibc returns large blocks to the kernel as soon as they are freed. The next step faults them in again, page by page:
200,000 faults and 0.4 s of system time in a 2 s step of the 14M model (docs/performance.md). On CUDA torch's own
allocator already reuses memory.
"""

import ctypes
import logging

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LIMIT = 2**30
"""Bytes: smaller blocks come from the heap, and the heap shrinks only when more than this is free at its end."""


def keep_freed_memory() -> None:
    """Make the process keep freed memory until it ends. Without glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_TRIM_THRESHOLD, LIMIT) and mallopt(M_MMAP_THRESHOLD, LIMIT)):
        log.info("the C library cannot keep freed memory; steps on CPU will be slower")
