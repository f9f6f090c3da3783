"""The look of all figures."""

import matplotlib as mpl
from matplotlib.colors import to_hex

from attnlib.draw import style


def test_the_look_is_seaborns_theme():
    import seaborn  # here: it takes 1.5 s, and not every worker comes by

    def taken(apply):
        with mpl.rc_context():
            mpl.rcdefaults()
            apply()
            cycle = [to_hex(color) for color in mpl.rcParams["axes.prop_cycle"].by_key()["color"]]
            found = {**mpl.rcParams, "axes.prop_cycle": cycle}
        return {k: round(v, 9) if isinstance(v, float) else v for k, v in found.items()}

    theme = {"context": "paper", "style": "whitegrid", "rc": style.SETTINGS}
    ours, theirs = taken(style.apply), taken(lambda: seaborn.set_theme(**theme))
    assert {name for name in theirs if ours[name] != theirs[name]} == {"image.cmap"}
