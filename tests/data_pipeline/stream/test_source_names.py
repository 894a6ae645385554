import pytest

from data_pipeline.stream.source_names import source_names


@pytest.mark.parametrize(
    ("addresses", "names"),
    [
        (("data/main",), ("main",)),
        (("data/web", "s3://bucket/code/"), ("web", "code")),
        (("en/main", "fr/main", "code"), ("en/main", "fr/main", "code")),
        (("a/en/main", "b/en/main", "b/fr/main"), ("a/en/main", "b/en/main", "fr/main")),
        (("main", "fr/main"), ("main", "fr/main")),
        (("data/main", "data/main/"), ("main.0", "main.1")),
    ],
)
def test_every_source_has_a_short_name_of_its_own(addresses: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert source_names(addresses) == names
