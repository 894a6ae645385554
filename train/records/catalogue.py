"""The meaning of every event kind in events.jsonl and of every value in metrics.jsonl.

The documentation's reference pages are made from these tables. `tests/train/records/test_catalogue.py` checks that they
are complete and that nothing in them is unused.
"""

EVENTS = {
    "submitted": "`keepstep submit` gave the run to Slurm: the ids of its jobs, in the order of the chain.",
    "started": "A rank 0 started: number of the attempt, world size, engine, device, versions. Begins an attempt.",
    "resumed": "A checkpoint was loaded, at a start or by a roll-back: its step and tokens, and the seconds it took.",
    "attention": "The form of attention that this attempt computes; the checkpoint's, unless the recipe names another.",
    "allowed_difference": "A setting differs from the checkpoint, and `--allow` permits it: name, old and new value.",
    "changed_setting": "A setting that changes the numbers, but needs no `--allow`, differs from the checkpoint: name, "
    "old and new value.",
    "booked": "The seconds by kind since the attempt's previous entry, and the step that was reached with them.",
    "saved": "A checkpoint is complete: step, tier, bytes, seconds of the background write, stall of the training loop "
    "in seconds, and the steps that retention removed.",
    "save_failed": "A save failed: step, tier, cause, and the number of failures of this tier in a row.",
    "quarantined": "A damaged checkpoint was renamed, so that it is never loaded again: step, cause and path.",
    "blocks_quarantined": "All ranks replaced damaged or unreadable data blocks from this data step on.",
    "skipped": "A batch was skipped and changed no weights: cause, data step and samples.",
    "spike": "Loss or gradient norm was far above recent values (`guard.on_spike: report`), or the gradient was zero: "
    "cause, data step, samples.",
    "rolled_back": "The run returned to its newest checkpoint because of a spike: cause, data step and samples.",
    "compiled_again": "torch.compile recompiled after the first step: cause and seconds of the step.",
    "profiled": "Steps were profiled: the first and the number of them, their seconds, and rank 0's shares of this "
    "time and the largest costs (`docs/profiling.md`).",
    "slow_rank": "A rank is a straggler: its rank and host, its probe time and the median probe time in seconds.",
    "hang": "The run made no progress for `train.hang_seconds`: the rank that is to blame, if known, and the cause.",
    "lost_node": "A launcher no longer hears another node, and ended its own ranks: the node and the reason.",
    "stop_requested": "`keepstep stop` asked the run to save and stop.",
    "stopped": "The attempt stopped on request: step, reason, and the seconds by kind since its previous entry.",
    "finished": "The last step is finished and saved, with the seconds by kind since the attempt's previous entry.",
    "failed": "A rank failed: its rank, exit code and error.",
}
"""Event kind -> what happened, and what the event's other values are."""

_VALIDATION = {
    "validation_loss": "Mean loss on the validation split after this step, in nats per target token.",
    "validation_perplexity": "e to the validation loss.",
    "validation_bits_per_byte": "The summed validation loss in bits, divided by the bytes of text of its targets; only "
    "if the tokenizer tells how many bytes each token stands for.",
}

METRICS = {
    "time": "Wall-clock time of the record, in seconds since 1970.",
    "step": "Optimizer steps finished.",
    "loss": "Mean cross-entropy loss of the step in nats per target token, over the global batch.",
    "loss/SOURCE": "The same for the targets of one data source; only if the recipe has several sources.",
    "lr": "Learning rate of the step.",
    "grad_norm": "Global norm of the gradients before clipping.",
    "tokens": "Tokens trained on since the start of the run.",
    "data_step": "Global batches taken from the stream: finished steps plus skipped batches.",
    "tokens_per_second": "Tokens of the global batch divided by the seconds of the step.",
    "model_flops_per_second": "Model FLOPs of forward and backward pass, without recomputation, divided by the seconds "
    "of the step; all ranks together.",
    "share_of_measured_peak": "`model_flops_per_second` divided by the speed of a large matrix product that all ranks "
    "measured at the start.",
    "mfu": "Model FLOPs utilization: `model_flops_per_second` divided by the datasheet peak of all devices; only if "
    "the datasheet peak is known.",
    "memory_gib": "Peak memory in GiB of the rank with the most: of its CUDA device, or of its process on CPUs. The "
    "other ranks' values come with their heartbeats.",
    "device_power_watts": "Power of all devices together, as of the last heartbeats; only with NVIDIA GPUs.",
    "device_clock_mhz": "Clock of the slowest device; only with NVIDIA GPUs.",
    "device_temperature_celsius": "Temperature of the hottest device; only with NVIDIA GPUs.",
    "device_alloc_retries": "Times that the allocators of all ranks ran out of memory and freed their caches, since "
    "the start; above 0, memory is too full. Only with CUDA devices.",
    "seconds": "Seconds by kind since the previous record; the kinds are those of `keepstep report`.",
    "uptime": "Seconds since the process started.",
    "attempt": "Number of the attempt that wrote the record, counted from 1.",
    **_VALIDATION,
    **{
        f"{name}/SOURCE": "The same for one data source; only if the recipe has several sources."
        for name in _VALIDATION
    },
    **{f"average_{name}": "The same for the average of the weights (`optim.ema_decay`)." for name in _VALIDATION},
    **{f"average_{name}/SOURCE": "The same for the average and one data source." for name in _VALIDATION},
    "task/TASK/METRIC": "A metric of a task of lm-evaluation-harness on the weights after this step "
    "(`train.evaluations`), as the harness names it.",
}
"""Name of a value in metrics.jsonl -> its meaning and unit. Words in capitals stand for one name each."""
