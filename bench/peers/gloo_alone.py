"""The communication of one step and nothing else: gloo sums the gradients of all parameters over the ranks."""

import torch
import torch.distributed as dist
from keepstep_model import model_config
from protocol import read_spec, serve

from train.model.flops import count_parameters

BUCKET = 25 * 2**20 // 4
"""Number of fp32 elements in one of DDP's buckets."""


def main() -> None:
    """Serve steps of all-reduces. Collective."""
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    dist.init_process_group("gloo")
    buckets = torch.zeros(count_parameters(model_config(spec))).split(BUCKET)

    def step() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    serve(spec, step)


if __name__ == "__main__":
    main()
