"""Wheels of a few lines, for pip without an index."""

from zipfile import ZipFile

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n{more}"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder, name, release, files, requires=""):
    """Write the wheel of a release; `files` maps paths to texts or bytes. Returns its path."""
    stem = f"{name.replace('-', '_')}-{release}"
    path = folder / f"{stem}-py3-none-any.whl"
    more = f"Requires-Dist: {requires}\n" if requires else ""
    info = {
        "METADATA": METADATA.format(name=name, release=release, more=more),
        "WHEEL": WHEEL,
        "RECORD": "",
    }
    with ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        for inside, content in info.items():
            archive.writestr(f"{stem}.dist-info/{inside}", content)
    return path
