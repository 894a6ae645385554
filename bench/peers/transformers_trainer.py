"""transformers' Trainer. It owns its loop, so a callback holds it back until the benchmark requests a step."""

import os
import threading

import torch
from hugging_face import build_llama
from protocol import read_spec, serve
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset):
    """4,096 rows of random tokens."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.rows = torch.randint(vocab_size, (4096, seq_len))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Gate(TrainerCallback):
    """Holds the Trainer's thread before each step until another thread requests it."""

    def __init__(self) -> None:
        self.requested, self.finished = threading.Semaphore(0), threading.Semaphore(0)

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Wait for a request."""
        self.requested.acquire()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Report that the step is finished."""
        self.finished.release()

    def step(self) -> None:
        """Let the Trainer run one step, and wait until it is finished."""
        self.requested.release()
        self.finished.acquire()


def main() -> None:
    """Serve steps of the Trainer. Collective."""
    spec = read_spec()
    arguments = TrainingArguments(
        output_dir="/tmp/keepstep-bench-trainer",
        per_device_train_batch_size=spec.micro_batch_size,
        max_steps=1_000_000,
        bf16=True,
        use_cpu=True,
        optim="adamw_torch_fused",
        torch_compile=spec.compile,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    gate = Gate()
    trainer = Trainer(build_llama(spec), arguments, train_dataset=Rows(spec.vocab_size, spec.seq_len), callbacks=[gate])
    threading.Thread(target=serve, args=(spec, gate.step), daemon=True).start()
    trainer.train()  # in the main thread, as its users run it


if __name__ == "__main__":
    main()
