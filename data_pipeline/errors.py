"""What a user can mend about the input text, the prepared data or its storage."""


class DataError(Exception):
    """The input or the data set is missing, damaged or unfit."""

    exit_code = 2


class StorageError(DataError):
    """A read failed, after retries, in a way that may pass (network, server): another try may succeed."""

    exit_code = 1
