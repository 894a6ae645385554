"""How a rank that torchrun started by hand tells why it ended."""

import subprocess
import sys
from pathlib import Path

from train.__main__ import let_segments_grow

ROOT = Path(__file__).parents[2]


def test_torchrun_shows_the_reason_in_its_own_table(tmp_path: Path) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=1", "-m", "train"]
    argv = [*torchrun, "recipes/laptop.yaml", f"runs_dir={tmp_path}", "train.stepz=3"]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    told = result.stderr.partition("Root Cause")[2]
    assert "exitcode  : 2" in told
    assert "traceback : unknown setting train.stepz; did you mean train.steps?" in told


def test_segments_of_the_allocator_grow_unless_the_user_has_chosen() -> None:
    env: dict[str, str] = {}
    let_segments_grow(env)
    assert env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:512"}
        let_segments_grow(chosen)
        assert chosen == {name: "max_split_size_mb:512"}
