"""The matrix products of one step and nothing else: a bound that no training step on this machine can beat."""

import torch
from keepstep_model import model_config
from protocol import read_spec, serve

from train.model.flops import step_products


def main() -> None:
    """Serve steps of matrix products."""
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    config = model_config(spec)
    work = []
    for times, out_width, in_width in step_products(config):
        x_ND = torch.randn(spec.micro_batch_size * spec.seq_len, in_width).bfloat16()
        grad_ND = torch.randn(spec.micro_batch_size * spec.seq_len, out_width).bfloat16()
        work.append((times, x_ND, torch.randn(out_width, in_width).bfloat16(), grad_ND))

    def step() -> None:
        for times, x_ND, weight, grad_ND in work:
            for _ in range(times):
                torch.mm(x_ND, weight.T)  # forward
                torch.mm(grad_ND, weight)  # gradient of the input
                torch.mm(grad_ND.T, x_ND)  # gradient of the weight

    serve(spec, step)


if __name__ == "__main__":
    main()
