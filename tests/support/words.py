"""The words of a printed text, however its lines are cut."""


def flat(text):
    """A text as one line, with one blank between words."""
    return " ".join(text.split())
