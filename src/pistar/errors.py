"""The one exception a user may see."""


class UserError(Exception):
    """Something the user can mend. Its message is one line: the value, why it cannot be, what to do.

    The command line prints it without a traceback. Everything else that is raised is a bug of ours.
    """
