"""Times the data pipeline against other libraries: tokens per CPU-second, start-up, resume, preparation.

    python3 -m venv /tmp/bench && cd /tmp/bench/bin
    ./pip install torch==2.13.0 numpy xxhash zstandard pydantic fsspec aiohttp sentencepiece tokenizers tiktoken
    ./pip install torch==2.13.0 datasets litdata mosaicml-streaming
    OMP_NUM_THREADS=1 PYTHONPATH=. /tmp/bench/bin/python bench/data.py [--tokens 100] [--folder /tmp/bench-data]

The libraries live in a separate environment, because Keepstep does not depend on them. A missing library is left out.
Reading: all loaders read the same uint16 tokens in rows of 1,024, batch 8, with a warm page cache, on one core.
Keepstep verifies every block. Loaders are timed in turn, each in its own process, in several rounds; the median is
printed. CPU seconds count all threads of the process. Keepstep returns tokens, labels, positions and documents; nanoGPT
returns tokens and targets; the others return tokens. Preparation: the text is Python's own sources. Prints Markdown.
"""

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import xxhash

from data_pipeline.build.packing import pack
from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.config import DataConfig
from data_pipeline.shards.manifest import FILES, Manifest, Shard, Split
from data_pipeline.shards.manifest_file import encode_files, write_manifest
from data_pipeline.shards.shard_file import PIECE, Block, ShardShape, write_shard
from data_pipeline.sources.records import ReadOptions
from data_pipeline.stream.stream import open_stream
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import load_tokenizer

ROW, BATCH, BLOCK_ROWS, VOCAB, END = 1024, 8, 128, 50_257, 0
ROUNDS, BATCHES = 5, 2000
COPIES = 3
"""Number of copies of Python's sources in the text that is prepared."""

Batches = Iterator[Any]


def write_tokens(folder: Path, tokens: int) -> np.ndarray:
    """Write the tokens that all loaders read; returns them. Documents have the lengths of typical source files."""
    random = np.random.default_rng(0)
    lengths = np.maximum(2, random.lognormal(6.8, 1.1, tokens // 1600).astype(np.int64))
    flat = random.integers(1, VOCAB, int(lengths.sum()), dtype=np.uint16)
    flat[np.cumsum(lengths) - 1] = END
    flat.tofile(folder / "tokens.bin")
    write_keepstep(folder / "keepstep", flat, lengths)
    return flat


def write_keepstep(out: Path, flat: np.ndarray, lengths: np.ndarray, copies: int = 1) -> None:
    """Write a data set of these documents. Its manifest lists its only shard `copies` times."""
    pieces = pack(lengths, ROW, "best-fit")
    rows = pieces.rows if copies == 1 else pieces.rows // BLOCK_ROWS * BLOCK_ROWS
    shape = ShardShape(rows, ROW, BLOCK_ROWS, 2)
    starts = np.cumsum(lengths) - lengths

    def blocks() -> Iterator[Block]:
        for block in range(shape.blocks):
            number = shape.rows_of_block(block)
            out_rows, used = np.full((number, shape.row_items), END, "<u2"), np.zeros(number, "<u4")
            piece_start, origins = [0], []
            for row in range(number):
                first, last = pieces.row_start[block * BLOCK_ROWS + row : block * BLOCK_ROWS + row + 2]
                for piece in range(first, last):
                    document, offset, length = pieces.document[piece], pieces.offset[piece], pieces.length[piece]
                    column = 2 + int(used[row])
                    source = int(starts[document] + offset)
                    out_rows[row, column : column + length] = flat[source : source + length]
                    origins.append((used[row], 0, document, offset))
                    used[row] += length
                piece_start.append(len(origins))
            out_rows[:, :2] = used.view("<u2").reshape(-1, 2)
            yield Block(out_rows, np.array(piece_start, np.uint32), np.array(origins, PIECE))

    for name in ("shards", "tokenizer"):
        (out / name).mkdir(parents=True)
    path = out / "shards" / "train-00000.shard"
    checksum = write_shard(path, shape, blocks())
    tokens = int(lengths.sum())
    shards = (Shard("shards/train-00000.shard", rows, path.stat().st_size, checksum),) * copies
    train = Split(rows * copies, len(lengths), tokens, rows * copies * ROW - tokens, 0, shards, (0,))
    splits = {"train": train, "validation": Split(0, 0, 0, 0, 0, (), ())}
    files = encode_files(["bench/data.py"])
    (out / FILES).write_bytes(files)
    counts, histogram = {"documents read": len(lengths)}, {str(1 << 32): len(lengths)}
    checksum = xxhash.xxh3_64_hexdigest(files)
    manifest = Manifest(ROW, BLOCK_ROWS, 2, "none", VOCAB, END, {}, splits, counts, histogram, files_xxh3=checksum)
    write_manifest(out, manifest)


def keepstep(folder: Path, first_step: int = 0, prefetch: int = 32) -> Batches:
    """Keepstep's batches from a step on."""
    config = DataConfig.model_validate({"sources": [{"path": str(folder)}], "prefetch_batches": prefetch})
    stream = open_stream(config, seq_len=ROW)
    return stream.steps(first_step=first_step, global_batch_size=BATCH, micro_batch_size=BATCH, rank=0, world_size=1)


def nanogpt(folder: Path) -> Batches:
    """Batches as in nanoGPT's get_batch: tokens and targets of random windows, with a new memory map for each batch."""
    import torch

    while True:
        data = np.memmap(folder / "tokens.bin", np.uint16, "r")
        starts = torch.randint(len(data) - ROW, (BATCH,))
        tokens = torch.stack([torch.from_numpy(data[i : i + ROW].astype(np.int64)) for i in starts])
        targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + ROW].astype(np.int64)) for i in starts])
        yield tokens, targets


def stand_in_for_torchvision() -> None:
    """Put an empty module in place of torchvision, which mosaicml-streaming imports for images.

    torchvision from PyPI is built for torch with CUDA."""

    def anything(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object

    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = ModuleType(f"torchvision{name}")
        module.__getattr__ = anything
        module.__spec__ = ModuleSpec(module.__name__, None)  # for code that checks whether the module exists
        sys.modules[module.__name__] = module


def mosaicml(folder: Path) -> Batches:
    """Batches of mosaicml-streaming, from rows in its format MDS."""
    stand_in_for_torchvision()
    from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    out = folder / "mds"
    if not out.exists():
        flat = np.fromfile(folder / "tokens.bin", np.uint16)
        with MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{ROW}"}) as writer:
            for row in flat[: len(flat) // ROW * ROW].reshape(-1, ROW):
                writer.write({"tokens": row})
    data = StreamingDataset(local=str(out), batch_size=BATCH, shuffle=True)
    while True:
        yield from DataLoader(data, batch_size=BATCH)


def litdata(folder: Path) -> Batches:
    """Batches of litdata, from chunks in its token format."""
    import litdata as ld  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    out = folder / "litdata"
    if not out.exists():
        from litdata.streaming.writer import BinaryWriter  # pyright: ignore[reportMissingImports]

        out.mkdir()
        writer = BinaryWriter(str(out), chunk_bytes=64 << 20, item_loader=ld.TokensLoader(ROW))
        import torch

        flat = np.fromfile(folder / "tokens.bin", np.uint16)
        for number, part in enumerate(np.array_split(flat, 100)):
            writer[number] = torch.from_numpy(part)
        writer.done()
        writer.merge()
    data = ld.StreamingDataset(str(out), item_loader=ld.TokensLoader(block_size=ROW), shuffle=True)
    while True:
        yield from DataLoader(data, batch_size=BATCH)


def hugging_face(folder: Path) -> Batches:
    """Shuffled batches of Hugging Face datasets, from a data set on disk."""
    from datasets import Dataset, load_from_disk
    from torch.utils.data import DataLoader

    out = folder / "datasets"
    if not out.exists():
        flat = np.fromfile(folder / "tokens.bin", np.uint16)
        rows = flat[: len(flat) // ROW * ROW].reshape(-1, ROW)
        Dataset.from_dict({"tokens": rows}).save_to_disk(str(out))
    data = load_from_disk(str(out)).with_format("torch")
    while True:
        yield from DataLoader(data, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[Path], Batches]] = {
    "Keepstep, every block verified": lambda folder: keepstep(folder / "keepstep"),
    "Keepstep, prefetch off": lambda folder: keepstep(folder / "keepstep", prefetch=0),
    "nanoGPT `np.memmap`": nanogpt,
    "mosaicml-streaming (MDS)": mosaicml,
    "litData `TokensLoader`": litdata,
    "HF datasets, shuffled": hugging_face,
}


def time_loaders(folder: Path) -> dict[str, float]:
    """Median tokens per CPU-second by loader. Each runs in its own process, because some leave threads behind."""
    rates: dict[str, list[float]] = {name: [] for name in LOADERS}
    for _ in range(ROUNDS):
        for name in LOADERS:
            program = (
                f"from pathlib import Path; from bench.data import measure; measure({name!r}, Path({str(folder)!r}))"
            )
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                rates[name].append(float(done.stdout.split()[-1]))
            elif not rates[name]:
                print(f"left out: {name}: {done.stderr.splitlines()[-1]}", file=sys.stderr)
    return {name: statistics.median(rate) for name, rate in rates.items() if rate}


def measure(name: str, folder: Path) -> None:
    """Print tokens per CPU-second of a loader."""
    batches = LOADERS[name](folder)
    for _ in islice(batches, 100):
        pass
    number = BATCHES if "Keepstep" in name or "nanoGPT" in name else BATCHES // 5
    started = time.process_time()
    for _ in islice(batches, number):
        pass
    print(number * BATCH * ROW / (time.process_time() - started))


START_PROGRAM = r"""
import re, sys, time
from pathlib import Path
from bench.data import keepstep
def kib(name): return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kib("VmRSS")
started, cpu = time.perf_counter(), time.process_time()
next(keepstep(Path(sys.argv[1]), int(sys.argv[2])))
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
print(seconds, cpu, (kib("VmHWM") - before) / 1024)
"""


def time_start(folder: Path, step: int) -> list[float]:
    """Medians of wall seconds, CPU seconds and MiB of memory from the imports to the first batch, in new processes."""
    command = [sys.executable, "-c", START_PROGRAM, str(folder), str(step)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(ROUNDS)]
    return [statistics.median(float(run[column]) for run in runs) for column in range(3)]


def python_sources() -> list[str]:
    """Texts of the modules in Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    return [file.read_text(encoding="utf-8", errors="replace") for file in files if "site-packages" not in file.parts]


def train_byte_bpe(texts: list[str], out: Path) -> None:
    """Train a byte-level BPE tokenizer of 8,192 tokens and save it in Hugging Face's format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=8192, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
        ),
    )
    out.mkdir(exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def time_preparation(folder: Path) -> list[tuple[str, float]]:
    """MB of text per CPU-second by tokenizer: encoding alone, and whole builds by one worker and by two."""
    texts = [text for text in python_sources() if text.strip()]
    size = sum(len(text.encode()) for text in texts) / 1e6
    source = folder / "sources"
    source.mkdir(exist_ok=True)
    for number, text in enumerate(COPIES * texts):
        (source / f"{number:05d}.txt").write_text(text, encoding="utf-8")
    train_byte_bpe(texts[::4], folder / "byte-bpe")
    train_sentencepiece(texts[::4], folder / "bpe", vocab_size=8192)
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    plain = tokenizers.Tokenizer.from_file(str(folder / "byte-bpe" / "tokenizer.json"))
    cpu = time.process_time()
    plain.encode_batch(texts, add_special_tokens=False)
    out = [("HF `encode_batch` alone, byte-level BPE", size / (time.process_time() - cpu))]
    for name, tokenizer in (("byte-level BPE (through tiktoken)", "byte-bpe"), ("SentencePiece BPE", "bpe")):
        load_tokenizer(folder / tokenizer).encode_batch(
            texts[:1]
        )  # builds the faster encoder, if the tokenizer has one
        one, one_cpu = build(folder, source, folder / tokenizer, 1)
        two, two_cpu = build(folder, source, folder / tokenizer, 2)
        out.append((f"`keepstep data build`, {name}", COPIES * size / one_cpu))
        out.append(
            (
                f"the same with two workers, {COPIES * size:.0f} MB: {one / two:.2f} times as fast",
                COPIES * size / two_cpu,
            )
        )
    return out


def build(folder: Path, source: Path, tokenizer: Path, workers: int) -> tuple[float, float]:
    """Wall and CPU seconds of a build, including the start of workers."""
    out = folder / "built"
    shutil.rmtree(out, ignore_errors=True)
    options = BuildOptions(read=ReadOptions(format="text"), task_bytes=2 << 20)
    wall, cpu = time.perf_counter(), _cpu()
    build_dataset([str(source)], out, tokenizer, options, workers=workers)
    return time.perf_counter() - wall, _cpu() - cpu


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    """Run all measurements and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100, help="tokens to read, in millions")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/keepstep-bench-data"))
    options = parser.parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_tokens(folder, options.tokens * 10**6)
    lengths = np.full(260_096, ROW)
    write_keepstep(folder / "large", np.zeros(int(lengths.sum()), np.uint16), lengths, copies=3845)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rates = time_loaders(folder)
    os.sched_setaffinity(0, cores)
    reference = rates["nanoGPT `np.memmap`"]
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}\n")
    print(f"| loader | M tokens per CPU-second (median of {ROUNDS}) | nanoGPT = 1 |\n| --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate / 1e6:.1f} | {rate / reference:.2f} |")
    print(
        "\n| new process, without imports | seconds to the first batch | CPU-seconds | MiB |\n| --- | --- | --- | --- |"
    )
    for name, data, step in (
        (f"{options.tokens} M tokens, step 0", "keepstep", 0),
        ("10^9 rows, step 0", "large", 0),
        ("10^9 rows, resume at step 10^8", "large", 10**8),
        ("10^9 rows, resume in epoch 80, step 10^10", "large", 10**10),
    ):
        seconds, cpu_seconds, mebibytes = time_start(folder / data, step)
        print(f"| {name} | {seconds:.3f} | {cpu_seconds:.3f} | {mebibytes:.0f} |")
    print("\n| preparation of Python's sources | MB per CPU-second |\n| --- | --- |")
    for name, figure in time_preparation(folder):
        print(f"| {name} | {figure:.2f} |")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
