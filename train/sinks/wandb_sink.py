"""Weights & Biases: one run there for all attempts of a run here."""

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

from train.sinks.resumable import SinkState
from train.sinks.sink import Figures

log = logging.getLogger(__name__)


class WandbSink:
    """Logs to the run whose id is in the run folder, or to a new one.

    The variables of wandb (`WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_BASE_URL`) apply. Without an API key
    it works offline, as nobody could answer its question for one; `wandb sync` uploads what it wrote. It collects
    nothing by itself: no console output, source, arguments or machine."""

    def __init__(self, folder: Path, state: SinkState, name: str, settings: Mapping[str, Any]) -> None:
        """`folder`: where wandb's own files go. `name`: of the run. `settings`: by dotted name."""
        self._state = state
        run_id = self._state.id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "keepstep"),
            id=run_id,
            name=name,
            dir=folder,
            resume="allow",
            mode=_mode(folder),
            config=dict(settings),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        if not self._state.id:
            self._state.begin(run_id)
        self.lacks_from = self._state.last_step

    def log(self, step: int, figures: Figures) -> None:
        """Log the values that wandb does not have yet."""
        if new := self._state.new(step, figures):
            self._run.log(new, step=step)
            self._state.sent(step, new)

    def close(self) -> None:
        """Finish the run there; a resume continues it."""
        self._run.finish()


def _mode(folder: Path) -> Literal["offline"] | None:
    """Return `offline` if wandb would ask for an API key; else None, which leaves it to wandb."""
    if os.environ.get("WANDB_MODE", "online") != "online" or wandb.login(prompt=False):
        return None
    log.info("wandb has no API key, so it works offline; `wandb sync %s/wandb/offline-*` uploads the run", folder)
    return "offline"
