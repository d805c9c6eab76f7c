"""Errors that are the user's to mend."""


class InputError(ValueError):
    """Something the user gave is wrong; the message names the value and the remedy."""
