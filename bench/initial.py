"""Time of drawing initial values: `python -m bench.initial recipes/llama-70b.yaml --ranks 1024 --rank 1023`.

It simulates one rank of the layout: the model is cut on the meta device, this rank's slices get memory, and their
values are drawn. For comparison it prints the rate of torch's own generator on one thread, which no layout can cut.
"""

import argparse
import time

import torch

from parallel.analysis.fake_world import fake_group
from parallel.engine import Trainable
from parallel.engines.fsdp2 import materialise, shard_model
from parallel.engines.initial import fill_model
from parallel.host_memory import keep_freed_memory
from parallel.layout import resolve_layout
from parallel.mesh import build_mesh
from parallel.sharded import local_part
from train.config import Recipe
from train.config_file import load_recipe
from train.start import trainable_of


def main() -> None:
    """Print the seconds of one rank's initial values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="settings, such as parallel.tensor=1")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the simulated world")
    parser.add_argument("--rank", type=int, default=0, help="the rank that is simulated")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.overrides)
    elements, seconds, processor = draw(recipe, options.ranks, options.rank)
    print(f"{recipe.name}, rank {options.rank} of {options.ranks}: {elements / 1e6:.1f} million values")
    print(f"drawn in {seconds:.2f} s by {torch.get_num_threads()} threads; {processor:.2f} s of processor time, so")
    print(f"{elements / processor / 1e6:.0f} million a second of a core")
    values = torch.zeros(1 << 25)
    began = time.process_time()
    values.normal_(generator=torch.Generator().manual_seed(1))
    rate = values.numel() / (time.process_time() - began)
    print(f"torch's own generator, which uses one core: {rate / 1e6:.0f} million a second")


def draw(recipe: Recipe, ranks: int, rank: int) -> tuple[int, float, float]:
    """Number of values that one rank holds; seconds, and seconds of processor time, of drawing them."""
    layout = resolve_layout(recipe.parallel, ranks)
    keep_freed_memory()  # as each rank does
    trainable: Trainable = trainable_of(recipe)
    with fake_group(ranks, rank):
        mesh = build_mesh(layout, "cpu")
        with torch.device("meta"):
            model = trainable.build()
        if recipe.parallel.engine == "fsdp2":
            shard_model(model, recipe.parallel, mesh)
        materialise(model, torch.device("cpu"))
        began, began_processor = time.perf_counter(), time.process_time()
        fill_model(model, trainable.initial_value)
        seconds, processor = time.perf_counter() - began, time.process_time() - began_processor
        return sum(local_part(parameter.detach()).numel() for parameter in model.parameters()), seconds, processor


if __name__ == "__main__":
    main()
