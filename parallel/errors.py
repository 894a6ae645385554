"""What a user can mend about how ranks are started and laid out."""


class LaunchError(Exception):
    """The launcher, the environment or the layout is wrong; nothing was started."""

    exit_code = 2
