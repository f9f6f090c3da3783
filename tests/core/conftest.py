"""What tests of the libraries need."""

import pytest

from attnlib.core import backends


@pytest.fixture
def on_hopper():
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
