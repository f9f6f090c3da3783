"""Where FlashAttention-3 comes from, and what is said when it does not come."""

import sys
from types import SimpleNamespace

import pytest

from attnlib.core.schedule import library


def clear():
    library.import_library.cache_clear()
    library._build_flags.cache_clear()
    library._distribution.cache_clear()


@pytest.fixture(autouse=True)
def forget():
    clear()
    yield
    clear()


@pytest.fixture
def only(monkeypatch):
    """Say which packages there are."""
    return lambda *there: monkeypatch.setattr(library, "_found", lambda name: name in there)


@pytest.mark.parametrize(
    "packages, module",
    [
        ((), ""),
        (("flash_attn_interface",), "flash_attn_interface"),
        (("sgl_kernel",), "sgl_kernel.flash_attn"),
        (("sgl_kernel", "flash_attn_interface"), "flash_attn_interface"),
    ],
)
def test_the_module_is_flash_attentions_own_or_sglangs(only, packages, module):
    only(*packages)
    assert library.find_module() == module


@pytest.mark.parametrize("names", [["tokenspeed_fa3"], ["flash-attn-3"], []])
def test_the_supplier_is_the_distribution_that_owns_the_module(only, monkeypatch, names):
    only("flash_attn_interface")
    owners = {"flash_attn_interface": names} if names else {}
    monkeypatch.setattr(library.metadata, "packages_distributions", lambda: owners)
    assert library.supplier() == (names[0].replace("_", "-") if names else "flash-attn-3")


@pytest.mark.parametrize(
    "name, install",
    [
        (library.FLASH_ATTN_3, "tokenspeed-fa3 .or flash-attn-3, or"),
        (library.FLASHMLA, "sgl-flash-mla$"),
    ],
)
def test_a_missing_library_comes_with_its_install_line(only, name, install):
    only()
    with pytest.raises(RuntimeError, match=f"{name} is not installed: pip install {install}"):
        library.import_library(name)


def test_a_library_that_does_not_load_says_why(only, monkeypatch):
    only("flash_attn_interface")

    def fail(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(library.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: libcudart.so.13"):
        library.import_library()


@pytest.mark.parametrize(
    "disabled, has",
    [
        (True, False),
        (False, True),
        (None, True),
    ],
)
@pytest.mark.parametrize(
    "asked, flag",
    [
        ("has_hdim96", "FLASHATTENTION_DISABLE_HDIM96"),
        ("has_latent", "FLASH_ATTENTION_DISABLE_HDIMDIFF64"),
    ],
)
def test_the_build_flags_say_which_head_dims_are_there_as_all_are_without_any(
    monkeypatch, asked, flag, disabled, has
):
    flags = {"build_flags": {flag: disabled}}
    config = None if disabled is None else SimpleNamespace(CONFIG=flags)
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    assert getattr(library, asked)() is has


@pytest.mark.parametrize(
    "module, release, build",
    [
        ("sgl_kernel", "0.4.10", "sglang"),
        ("sgl_kernel", "0.4.4", "sglang-0.4.4"),
        ("sgl_kernel", None, "sglang-0.4.4"),
        ("flash_attn_interface", "0.4.10", "upstream"),
    ],
)
def test_the_module_says_whose_build_it_is(only, monkeypatch, module, release, build):
    def version(distribution):
        if release is None:
            raise library.metadata.PackageNotFoundError(distribution)
        return release

    only(module)
    monkeypatch.setattr(library.metadata, "version", version)
    assert library.build() == build
