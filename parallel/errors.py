"""Errors in how ranks are started and laid out, which a user can fix."""


class LaunchError(Exception):
    """The launcher, the environment or the layout is wrong; nothing was started."""

    exit_code = 2
