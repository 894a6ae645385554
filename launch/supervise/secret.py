"""The secret that the nodes of one job share, and messages that only its holders can write.

`slurm/train.sbatch` makes a secret for each attempt and `keepstep kubernetes` one for each manifest. Where people start
the nodes themselves, they set KEEPSTEP_JOB_SECRET to the same text on every node. Without it, messages are still
checked for form, but anybody who reaches the head's port can write them.

The secret is in the environment of `keepstep run` alone: not in its arguments, not in files of the run, and the ranks
do not get it.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from parallel.errors import LaunchError

VARIABLE = "KEEPSTEP_JOB_SECRET"
LEAST_CHARACTERS = 16
MAC_BYTES = 64
"""Length of the HMAC-SHA256 in hexadecimal that begins a sealed message."""


def new_secret() -> str:
    """Return a new secret of 256 random bits, as hexadecimal digits."""
    return secrets.token_hex(32)


def job_secret(env: Mapping[str, str]) -> bytes:
    """Return the job's secret, b"" if there is none. LaunchError if it is too short to be one."""
    text = env.get(VARIABLE, "")
    if text and len(text) < LEAST_CHARACTERS:
        raise LaunchError(
            f"{VARIABLE} has {len(text)} characters, but it needs at least {LEAST_CHARACTERS}; set it to the output of "
            "`openssl rand -hex 32`, the same on all nodes"
        )
    return text.encode()


def seal(secret: bytes, purpose: str, text: bytes) -> bytes:
    """Return the text with its HMAC in front. A message of one purpose is not valid for another."""
    return _mac(secret, purpose, text) + text


def unseal(secret: bytes, purpose: str, sealed: bytes) -> bytes | None:
    """Return the text of a sealed message, or None if this secret did not seal it for this purpose."""
    mac, text = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    return text if hmac.compare_digest(mac, _mac(secret, purpose, text)) else None


def _mac(secret: bytes, purpose: str, text: bytes) -> bytes:
    return hmac.new(secret, purpose.encode() + b"\0" + text, hashlib.sha256).hexdigest().encode()
