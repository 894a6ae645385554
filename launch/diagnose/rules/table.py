"""All rules, in the order of causality."""

from launch.diagnose.rules import curves, ending, machines, meeting, models, preparing, slurm, start, training, unknown

RULES = (
    *ending.RULES,
    *slurm.RULES,
    *machines.RULES,
    *training.RULES,
    *start.RULES,
    *meeting.RULES,
    *preparing.RULES,
    *models.RULES,
    *curves.RULES,
    *unknown.RULES,
)

BY_NAME = {rule.name: rule for rule in RULES}
