"""Where FlashAttention-3 comes from, and what is said when it does not come."""

import sys
from types import SimpleNamespace

import pytest

from attnlib.core.schedule import library


@pytest.fixture(autouse=True)
def forget():
    library.load.cache_clear()
    library.has_hdim96.cache_clear()
    yield
    library.load.cache_clear()
    library.has_hdim96.cache_clear()


def only(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(library, "_found", lambda package: package in packages)


@pytest.mark.parametrize(
    ("packages", "module"),
    [
        ((), ""),
        (("flash_attn_interface",), "flash_attn_interface"),
        (("sgl_kernel",), "sgl_kernel.flash_attn"),
        (("sgl_kernel", "flash_attn_interface"), "flash_attn_interface"),
    ],
)
def test_the_module_is_flash_attentions_own_or_sglangs(monkeypatch, packages, module):
    only(monkeypatch, *packages)
    assert library.find_module() == module


@pytest.mark.parametrize(
    ("owners", "supplier"),
    [
        ({"flash_attn_interface": ["tokenspeed_fa3"]}, "tokenspeed-fa3"),
        ({"flash_attn_interface": ["flash-attn-3"]}, "flash-attn-3"),
        ({}, library.NO_DISTRIBUTION),
    ],
)
def test_the_supplier_is_the_distribution_that_owns_the_module(monkeypatch, owners, supplier):
    only(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(library.metadata, "packages_distributions", lambda: owners)
    assert library.supplier() == supplier


def test_a_missing_library_comes_with_its_install_line(monkeypatch):
    only(monkeypatch)
    with pytest.raises(RuntimeError, match=r"not installed: pip install tokenspeed-fa3"):
        library.load()


def test_a_library_that_does_not_load_says_why(monkeypatch):
    only(monkeypatch, "flash_attn_interface")

    def fail(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(library.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: libcudart.so.13"):
        library.load()


@pytest.mark.parametrize(("disabled", "has"), [(True, False), (False, True)])
def test_the_build_flags_say_whether_head_dim_96_is_there(monkeypatch, disabled, has):
    flags = {"build_flags": {"FLASHATTENTION_DISABLE_HDIM96": disabled}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace(CONFIG=flags))
    assert library.has_hdim96() is has


def test_a_build_without_flags_has_head_dim_96(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_config", None)
    assert library.has_hdim96() is True
