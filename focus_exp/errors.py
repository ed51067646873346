"""The one exception for everything a user can put right."""


class UserError(Exception):
    """Bad input: what is wrong, where, and what to do. The command line prints it and exits with 2."""
