from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.sources.splitting import split


@given(
    data=st.text("ab-", max_size=60).map(str.encode),
    separator=st.sampled_from([b"-", b"--", b"-a-"]),
    size=st.integers(1, 9),
    limit=st.integers(1, 8),
)
def test_the_pieces_do_not_depend_on_the_size_of_the_chunks(
    data: bytes, separator: bytes, size: int, limit: int
) -> None:
    pieces = data.split(separator)
    expected = [piece if len(piece) <= limit else None for piece in (pieces[:-1] if not pieces[-1] else pieces)]
    stream = [data[start : start + size] for start in range(0, len(data), size)]
    out = list(split(stream, separator, limit))
    assert [piece for piece, _ in out] == expected
    assert sum(length for _, length in out) == len(data)
