"""Preparation from and training on an S3 store: moto's server on loopback."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.stream.stream import open_stream
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import config, write_jsonl

pytestmark = [
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:moto"),
]


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    """An empty bucket `data` that s3:// addresses reach."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("data")
        yield
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_data_set_in_a_bucket_gives_the_same_stream(bucket: None, built: Built) -> None:
    import s3fs

    s3fs.S3FileSystem().put(str(built.path), "data/set", recursive=True)
    got = {}
    for address in ("s3://data/set", str(built.path)):
        with open_stream(config(address, prefetch_batches=8), seq_len=32) as stream:
            steps = stream.steps(first_step=3, global_batch_size=8, micro_batch_size=4, rank=1, world_size=2)
            got[address] = [batch.tokens_BT.tobytes() for step in islice(steps, 40) for batch in step]
            assert stream.fingerprint
    assert len(set(map(str, got.values()))) == 1


def test_text_in_a_bucket_gives_the_same_data_set_as_text_in_a_folder(
    bucket: None, built: Built, tokenizer: Path, tmp_path: Path
) -> None:
    import s3fs

    file = write_jsonl(tmp_path / "in.jsonl", built.texts)
    s3fs.S3FileSystem().put(str(file), "data/text/in.jsonl")
    options = BuildOptions(seq_len=32, task_bytes=5000)
    manifests = [
        build_dataset([address], tmp_path / name, tokenizer, options, pool=Pool(None))
        for name, address in (("s3", "s3://data/text/*.jsonl"), ("local", str(file)))
    ]
    assert manifests[0] is not None
    assert manifests[1] is not None
    assert manifests[0].fingerprint == manifests[1].fingerprint
