"""The newest release that a plugin knows is the newest whose rules `explain` has."""

import pytest

from attnlib.engines import sglang, vllm
from attnlib.select.libraries import find


@pytest.mark.parametrize(("name", "plugin"), [("sglang", sglang), ("vllm", vllm)])
def test_the_newest_release_of_a_plugin_is_the_newest_with_rules(name, plugin):
    library, _ = find(f"{name}=={plugin.NEWEST}")
    known = library.releases[-1]
    assert known == plugin.NEWEST, f"read data/rules/{name}.yaml and NEWEST of the plugin anew"
