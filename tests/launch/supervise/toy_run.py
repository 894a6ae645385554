"""Runs the toy trainer as `keepstep run` runs training: toy_run.py RANKS FOLDER STEPS [FAULT ...]"""

import sys
from pathlib import Path

from launch.supervise.local import Node, start
from train.config_file import load_recipe

HERE = Path(__file__).parent
ranks, folder, *rest = sys.argv[1:]
recipe = load_recipe(HERE.parents[2] / "recipes/laptop.yaml", [f"runs_dir={folder}", "name=toy"])
command = [sys.executable, "-P", str(HERE / "toy_train.py"), folder, *rest]
sys.exit(start(command, recipe, Node(int(ranks)), max_restarts=2, stop_seconds=600))
