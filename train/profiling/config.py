"""The section `train.profile` of recipes."""

from pydantic import Field

from train.section import Section

MOST_STEPS = 1000
"""Steps that one profile may have: each adds megabytes to its trace."""


class ProfileConfig(Section):
    """A profile of some steps, which all ranks make. `keepstep profile` asks a live run for another."""

    at: int = Field(default=0, ge=0)
    """First step of the profile, counted from 1; 0: no profile. The first steps of a start are slower than others."""
    steps: int = Field(default=3, gt=0, le=MOST_STEPS)
    """Number of steps in the profile."""
