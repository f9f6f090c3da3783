"""The keys and labels that older releases printed, written out once more: an oracle for reading."""

from functools import singledispatch

from attnlib.core.spec import EXTEND_MODES
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.mla.case import MlaCase


@singledispatch
def old_key(case):
    raise TypeError(case)


@singledispatch
def old_label(case):
    raise TypeError(case)


@old_key.register
def _(case: DecodeCase):
    spec = case.spec
    words = [f"{spec.heads},d{spec.head_dim},p{spec.page_size},b{case.batch_size},k{case.kv_len}"]
    words += [f"w{spec.window}"] * (spec.window > 0)
    words += [spec.dtypes] * (spec.dtypes != "bfloat16")
    words += [case.lengths] * (case.lengths != "fixed")
    words += [f"seed{case.seed}"] * (case.seed > 0)
    words += [f"context{case.context}"] * (case.context > 0)
    return ",".join(words)


@old_label.register
def _(case: DecodeCase):
    spec = case.spec
    words = [f"{spec.heads} d{spec.head_dim} {spec.dtypes} page {spec.page_size}"]
    words += [f"window {spec.window}"] * (spec.window > 0)
    words += [f"batch {case.batch_size} kv_len {case.kv_len}"]
    words += [case.lengths] * (case.lengths != "fixed")
    words += [f"context {case.context}"] * (case.context > 0)
    return " ".join(words)


def _unusual(case):
    words = [case.mask] * (case.mask != EXTEND_MODES[case.mode][0])
    return words + [case.q_lengths] * (case.q_lengths != "")


@old_key.register
def _(case: ExtendCase):
    return ",".join([case.mode, f"q{case.q_len}", *_unusual(case), old_key(case.cached)])


@old_label.register
def _(case: ExtendCase):
    words = [f"{case.mode} q_len {case.q_len}", *_unusual(case), old_label(case.cached)]
    return " ".join(words)


@old_key.register
def _(case: MlaCase):
    return old_label(case).replace(" ", ",")


@old_label.register
def _(case: MlaCase):
    spec = case.spec
    chosen = f"top {spec.top_k}" if spec.top_k else "dense"
    words = [f"mla {spec.num_qo_heads} heads {chosen} {spec.kv_format} page {spec.page_size}"]
    words += [f"batch {case.batch_size} kv_len {case.kv_len}"]
    words += [case.lengths] * (case.lengths != "fixed")
    words += [f"seed {case.seed}"] * (case.seed > 0)
    words += [f"q_len {case.q_len}"] * (case.q_len > 1)
    words += [f"context {case.context}"] * (case.context > 0)
    return " ".join(words)
