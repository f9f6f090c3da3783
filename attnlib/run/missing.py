"""What leaves a question open here: no record answers it, no GPU is here, no verdict was reached.

Each has the same exit status, whichever command is asked.
"""


class NotOnRecordError(FileNotFoundError):
    """No record answers, and nothing is measured here."""


class NoGpuError(RuntimeError):
    """Only a CUDA GPU answers, and none is here."""


class NoVerdictError(RuntimeError):
    """The rounds that were measured do not decide it."""


UNANSWERED = (NotOnRecordError, NoGpuError, NoVerdictError)
