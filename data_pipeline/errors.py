"""Errors in input text, prepared data or storage that a user can fix."""


class DataError(Exception):
    """The input or the data set is missing, damaged or unusable."""

    exit_code = 2


class StorageError(DataError):
    """A read failed after all retries for a reason that may be temporary, such as a network or server error."""

    exit_code = 1
