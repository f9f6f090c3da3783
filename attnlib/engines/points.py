"""What the plugins of all engines do: which functions are hooked, and whether a release has them.

Engines log what fails when a plugin is imported and go on without it, so this loads no torch.
"""

import inspect
import logging
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

from ..core.backends.table import installed_version
from .arms import STATE, Engine, read_variables, without_effect
from .capture import Capture

logger = logging.getLogger(__name__)
Function = Callable[..., Any]


class Point(NamedTuple):
    """A hook point: for which arms (`name`, or `name=value`), on which function, how, with what.

    `reads` are the parameters that the function must have, `knows` others that it may have, none:
    any. `since` and `before` bound the releases that have the function.
    """

    arms: tuple[str, ...]
    path: str
    how: str
    hook: Function
    reads: tuple[str, ...] = ("self",)
    knows: tuple[str, ...] = ()
    since: str = ""
    before: str = ""


def start(
    engine: Engine,
    oldest: str,
    newest: str,
    hook: Callable[[str], None],
) -> None:
    """What an entry point does: read the variables into STATE, `hook` a release for them, guard it.

    Where no variable is set it hooks nothing; one that does nothing is named in the log. `oldest`
    and `newest` are the first and the last release that was read. Raises SystemExit with the reason
    where it cannot.
    """
    try:
        arms, path = read_variables(os.environ, engine)
        for words in without_effect(os.environ, engine):
            STATE.say(f"attnlib: {words}")
        if not arms and not path:
            return
        names = []
        for name in os.environ:
            if name.startswith(engine.prefix):
                names.append(name)
        variables = " and ".join(names)
        release = require_release(engine, oldest, f"unset {variables}")
        STATE.arms = arms
        STATE.capture = _capture(engine, path)
        hook(release)
        if order(release) > order(newest):
            logger.warning(
                "attnlib: %s %s is newer than %s, the last release that was read; its functions "
                "have the known parameters, their meaning is not checked",
                engine.title,
                release,
                newest,
            )
        if "guard" in arms:
            from ..core.schedule.guard import guard

            STATE.guard = guard(engine.package, mode=arms["guard"])
    except Exception as error:
        raise SystemExit(f"attnlib: {error}") from error
    # SGLang sets its log level later: anything below a warning would not be shown.
    logger.warning("attnlib is on: %s, capture %s", arms, path or None)


def require_release(engine: Engine, oldest: str, remedy: str) -> str:
    """The installed release; RuntimeError with `remedy` unless it is `oldest` or later."""
    release = installed_version(engine.package)
    if order(release) < order(oldest):
        got = release or "none"
        raise RuntimeError(f"{engine.package} must be {oldest} or later, got {got}: {remedy}")
    return release


def order(release: str) -> tuple[int, ...]:
    """The numbers of a release, in order: 0.5.12, 0.5.12.post1, 0.5.13, 0.5.13rc1; no build (+)."""
    version = release.partition("+")[0]
    return tuple(map(int, re.findall(r"\d+", version)))


def _capture(engine: Engine, path: str) -> Capture | None:
    try:
        return Capture(path) if path else None
    except OSError as error:
        words = f"{engine.prefix}CAPTURE must be a file to append to, got {error}"
        raise ValueError(words) from error


@contextmanager
def ending_capture(engine: Engine, capture: Capture) -> Iterator[None]:
    """An error inside ends the capture with one message in the log, not the engine."""
    try:
        yield
    except Exception as error:
        STATE.capture = None
        logger.exception(
            "attnlib: %sCAPTURE=%s ends, %s: no further step is captured, %s goes on",
            engine.prefix,
            capture.path,
            error,
            engine.title,
        )


def known_in(release: str, points: Iterable[Point]) -> list[Point]:
    """The points of a release."""
    here = order(release)
    since = [point for point in points if order(point.since) <= here]
    found = []
    for point in since:
        if not point.before or here < order(point.before):
            found.append(point)
    return found


def needed(points: Iterable[Point]) -> list[Point]:
    """The points that STATE's arms and capture need."""
    wanted = {*STATE.arms}
    wanted.update(f"{name}={value}" for name, value in STATE.arms.items())
    if STATE.capture:
        wanted.add("capture")
    return [point for point in points if wanted.intersection(point.arms)]


def require_hookable(point: Point, hooked_by: str = "") -> Function:
    """The function of a point; RuntimeError where it cannot be hooked, or `hooked_by` did."""
    path = point.path
    try:
        target = pkgutil.resolve_name(path)
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(f"{path} must be importable to be hooked, got: {error}") from error
    if hooked_by or not inspect.isfunction(target):
        got = f"one that {hooked_by} has hooked already" if hooked_by else repr(target)
        raise RuntimeError(f"{path} must be a function that is not hooked yet, got {got}")
    if words := unfit(point, {*inspect.signature(target).parameters}):
        raise RuntimeError(words)
    return target


def hook_in_place(point: Point) -> None:
    """Replace the function of a point by its hook, called with the function first."""
    original = require_hookable(point)
    owner, _, name = point.path.replace(":", ".").rpartition(".")

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return point.hook(original, *args, **kwargs)

    setattr(pkgutil.resolve_name(owner), name, hooked)


def unfit(point: Point, names: Set[str]) -> str:
    """Why a function with the parameters `names` cannot be hooked, or the empty string."""
    missing = {*point.reads} - names
    if missing:
        return f"{point.path} must have the parameters {', '.join(sorted(missing))}"
    unknown = names - {*point.reads, *point.knows}
    if point.knows and unknown:
        words = f"{point.path} must have no parameters but those that were read"
        return f"{words}, got {', '.join(sorted(unknown))}"
    return ""


def require_met(arm: str, not_met: Mapping[str, object]) -> None:
    """ValueError naming all that `arm` must have and has not."""
    missing = [name for name, is_missing in not_met.items() if is_missing]
    if missing:
        raise ValueError(f"{arm} must have {' and '.join(missing)}")


def named(function: Function, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by the function's own names, defaults included."""
    defaults = defaults_of(function)
    by_position = dict(zip(defaults, args, strict=False))
    return defaults | by_position | kwargs


@cache
def defaults_of(function: Function) -> dict[str, Any]:
    """Parameters of a function, in order -> their defaults."""
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items()}
