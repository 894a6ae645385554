"""What a user can mend about the input text, the prepared data or its storage."""


class DataError(Exception):
    """The input or the data set is missing, damaged or unfit."""

    exit_code = 2
