"""Objects that are attacked: a tokenizer and a data set."""

from tests.data_pipeline.conftest import built, tokenizer

__all__ = ["built", "tokenizer"]
