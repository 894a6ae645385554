"""Errors that a user can fix. They are shown as one line, without a traceback, and have a documented exit code.

`parallel` and `data_pipeline` import neither each other nor this package, so each defines its own error class. All of
them have the attribute `exit_code`, and `USER_ERRORS` lists them.
"""

from data_pipeline.errors import DataError
from parallel.errors import LaunchError
from train.exit_codes import FAILED, FAILED_FOR_GOOD, OUT_OF_MEMORY, STOPPED


class ConfigError(Exception):
    """A recipe or an option is wrong."""

    exit_code = FAILED_FOR_GOOD


class CheckpointError(Exception):
    """No checkpoint fits the run, or a checkpoint is damaged."""

    exit_code = FAILED_FOR_GOOD


class DivergedError(Exception):
    """Too many steps had a loss spike or a non-finite loss or gradient."""

    exit_code = FAILED_FOR_GOOD


class ExhaustedError(Exception):
    """Disk or memory ran out. Another attempt may find more of it."""

    exit_code = FAILED


class DeviceMemoryError(Exception):
    """The memory of a device ran out before the attempt finished a step."""

    exit_code = OUT_OF_MEMORY


class StoppedError(Exception):
    """The process was asked to stop while there was nothing to save. Unfinished work is discarded without a trace."""

    exit_code = STOPPED


USER_ERRORS = (
    ConfigError,
    CheckpointError,
    DivergedError,
    ExhaustedError,
    DeviceMemoryError,
    StoppedError,
    DataError,
    LaunchError,
)
