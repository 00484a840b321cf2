"""The two ways a job can end badly, told apart by exit code (and by HTTP status when served)."""


class UserError(Exception):
    """Bad usage or bad input: one sentence saying what is wrong, where, and what to do. Exit code 2, HTTP 400."""


class JobError(Exception):
    """The job was asked for something sensible and could not do it: one sentence. Exit code 1, HTTP 500."""
