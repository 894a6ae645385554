"""Errors that a user can mend: shown as one line, without a traceback, with a documented exit code.

`parallel` and `data_pipeline` know neither each other nor this package, so each owns its own error class; what the
classes share is the attribute `exit_code`, and `USER_ERRORS` lists them all.
"""

from data_pipeline.errors import DataError
from parallel.errors import LaunchError
from train.exit_codes import FAILED_FOR_GOOD, STOPPED


class ConfigError(Exception):
    """A recipe or an option is wrong."""

    exit_code = FAILED_FOR_GOOD


class CheckpointError(Exception):
    """No checkpoint fits, or what is there is damaged."""

    exit_code = FAILED_FOR_GOOD


class DivergedError(Exception):
    """Too many steps in which losses or gradients were not what they should be."""

    exit_code = FAILED_FOR_GOOD


class StoppedError(Exception):
    """Asked to stop where there is nothing to save: what was begun is given up, and nothing half-written stays."""

    exit_code = STOPPED


USER_ERRORS = (ConfigError, CheckpointError, DivergedError, StoppedError, DataError, LaunchError)
