"""The image has what fast networks and GPUs need."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_image_has_the_libraries_of_rdma_and_the_extra_for_fp8() -> None:
    text = (ROOT / "slurm" / "Dockerfile").read_text()
    installed = re.search(r"apt-get install ((?:[^\\&]|\\\n)*)", text)
    assert installed is not None
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed[1].split())
    extras = re.search(r'"\.\[([\w,]+)\]"', text)
    assert extras is not None
    assert "fp8" in extras[1].split(",")
