"""The section `train.evaluations` of a recipe."""

from pydantic import Field

from data_pipeline.config import ExpandedPath
from train.section import Section


class TasksConfig(Section):
    """Tasks of lm-evaluation-harness that the run evaluates on its live weights. They need the extra `lm-eval`."""

    tasks: tuple[ExpandedPath, ...] = ()
    """Names of tasks, or folders with task files. Their data are loaded before the first step."""
    every: int = Field(default=1000, gt=0)
    """Optimizer steps between evaluations. The last step is always evaluated."""
    limit: int | None = Field(default=None, gt=0)
    """Examples of each task; null: all."""
    batch_size: int | None = Field(default=None, gt=0)
    """Texts per rank in one forward pass; null: `train.micro_batch_size`."""
