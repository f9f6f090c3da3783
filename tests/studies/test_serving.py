"""Servers under load: what is kept of one that works, and that one which fails leaves nothing."""

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.studies import CPU

from attnlib.cli import build_parser
from attnlib.measure.calls.cases import read_case
from attnlib.run import store
from attnlib.run.rows import machine_slug
from attnlib.studies.metadata.schedules import MODELS as SCHEDULED
from attnlib.studies.serving import measure as measuring
from attnlib.studies.serving import served as study
from attnlib.studies.serving import server as servers
from attnlib.studies.serving.case import WORDS, Request, ServingCase
from attnlib.studies.serving.engine import ENGINES, ServerError, engine_named, read_arm
from attnlib.studies.serving.measure import Answer, reduced, window
from attnlib.studies.serving.models import MODELS, make_model
from attnlib.studies.serving.rounds import Load, Plan, backend_of, drive, drive_all
from attnlib.studies.serving.served import compared, requests_of, tokens_over_time

TESTS = Path(__file__).resolve().parents[1]
MODULE = "support.stand_in_server"
CASE = ServingCase("demo", 3, 40, "40+10+20", output_len=40, turns=2)
SLUG = machine_slug(CPU)


def gone(pid, within=5.0):
    """Whether a process ends, or has ended and nobody has asked how."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            said = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return True
        if said.rpartition(")")[2].startswith(" Z"):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty data folder, and locks of its own."""
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setenv("ATTNLIB_LOCKS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return tmp_path


@pytest.fixture
def plan_of(data, free_port):
    """A plan over the stand-in: two arms, one load, two rounds."""

    def make(
        *,
        engine="sglang",
        arms=("default", "splits=bounded"),
        cases=(CASE,),
        logs="logs",
        port=free_port,
        **fields,
    ):
        stand_in = replace(ENGINES[engine], module=MODULE)
        (data / logs).mkdir(exist_ok=True)
        setup = servers.Setup(stand_in, data / "model", (), data / logs)
        rounds = fields.pop("rounds", 2)
        return Plan(
            study="served",
            engine=engine,
            setup=setup,
            arms=tuple(read_arm(arm, stand_in) for arm in arms),
            loads=tuple(Load(case, rounds) for case in cases),
            port=port,
            **{"say": lambda words: None, **fields},
        )

    return make


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return port if port < 60_000 else port - 9_000


def nothing_is_left(data):
    """Every process that a stand-in says to have started is gone."""
    logs = list((data / "logs").glob("*.log"))
    assert logs
    for log in logs:
        for line in log.read_text().splitlines():
            if line.startswith("child "):
                assert gone(int(line.split()[1])), log
    return True


@pytest.mark.parametrize("together", [False, True])
def test_arms_take_turns_and_each_round_has_a_record_of_every_arm(plan_of, data, together):
    said = []
    plan = plan_of(together=together, say=said.append)
    assert drive(plan, CPU) == 4
    assert nothing_is_left(data)
    frame = store.load("served", SLUG)
    turns = frame.sort_values("started_at")[["round", "backend"]].values.tolist()
    bounded = "sglang splits=bounded"
    assert turns == [[0, "sglang"], [0, bounded], [1, bounded], [1, "sglang"]]
    assert set(frame.reported_backend.str.partition(";")[0]) == {"fa3", "fa3 splits=bounded"}
    hashes = set(frame.reported_backend.str.partition("tokens ")[2])
    assert len(hashes) == 1
    row = frame.iloc[0]
    requests = requests_of(row)
    assert requests.prompt.tolist() == [40, 10, 20] * 2
    assert (requests.started_s < requests.first_s).all()
    assert (requests.first_s < requests.ended_s).all()
    gaps = tokens_over_time(row)
    assert len(gaps) == measuring.MOST_SAMPLES < requests.output.sum() - len(requests)
    assert gaps.itl_ms.min() <= row.itl_p50_us / 1e3 <= gaps.itl_ms.max()
    assert len([line for line in said if "ready" in line]) == 4


def two_plans(plan_of, free_port, **fields):
    """Plans over two models, whose servers may be up side by side."""
    other = replace(CASE, model="other")
    first = plan_of(together=True, **fields)
    second = plan_of(together=True, cases=(other,), logs="more", port=free_port + 2, **fields)
    return first, second


def test_servers_of_two_models_are_up_side_by_side(plan_of, data, free_port):
    said = []
    plans = two_plans(plan_of, free_port, say=said.append)
    assert drive_all(plans, CPU) == 8
    order = [" ready " if " ready " in line else "load" for line in said]
    assert order == ([" ready "] * 4 + ["load"] * 4) * 2
    assert nothing_is_left(data) and list((data / "more").glob("*.log"))
    frame = store.load("served", SLUG)
    assert frame.groupby(["case", "round"], sort=False).size().tolist() == [2] * 4
    assert drive_all(plans, CPU) == 0
    with pytest.raises(ValueError, match="plans must each be together"):
        drive_all([plans[0], replace(plans[1], together=False)], CPU)


@pytest.mark.parametrize("how", ["ends at once", "dies"])
def test_a_plan_whose_server_fails_leaves_the_others_going(
    plan_of, data, free_port, monkeypatch, how
):
    plans = two_plans(plan_of, free_port)
    real = servers.Setup.environment

    def environment(setup, arm):
        bad = setup.logs.name == "more" and arm.variables
        return real(setup, arm) | {"STAND_IN": how if bad else ""}

    monkeypatch.setattr(servers.Setup, "environment", environment)
    with pytest.raises(ServerError, match="'splits=bounded'"):
        drive_all(plans, CPU)
    frame = store.load("served", SLUG)
    assert frame[frame.case == CASE].groupby("round").size().tolist() == [2, 2]
    of_failed = frame[frame.case != CASE]
    kept = [] if how == "ends at once" else [[0, "sglang"]]
    assert of_failed[["round", "backend"]].values.tolist() == kept
    assert not list((data / "more").glob("sglang-1-*.log")), "no server of it starts again"
    assert nothing_is_left(data)


def test_the_faster_arm_is_found_and_a_second_run_measures_nothing(plan_of, monkeypatch):
    monkeypatch.setenv("STAND_IN_TOKEN_S", "0.01")
    plan = plan_of()
    drive(plan, CPU)
    assert drive(plan, CPU) == 0
    frame = store.load("served", SLUG)
    table = compared(frame, [("sglang splits=bounded", "sglang")]).set_index("metric")
    assert 0.4 < table.ratio["ITL p50"] < 0.75
    assert table.ratio["time per token"] < 0.75
    assert table.rounds.eq(2).all()
    assert table.base_ms["ITL p50"] > 10
    saved = study.saved(frame, [("sglang splits=bounded", "sglang")], "request")
    lives = [np.median(np.subtract(row.ended_us, row.started_us)) for row in frame.itertuples()]
    means = frame.assign(life=lives).groupby("backend").life.mean()
    whole = 100 * (1 - means["sglang splits=bounded"] / means["sglang"])
    assert saved.saved.iloc[0] == pytest.approx(whole)
    assert saved.rounds.iloc[0] == 2


def test_an_open_loop_asks_at_a_share_of_what_the_base_has_served(plan_of):
    opened = replace(CASE, load=50)
    plan = plan_of(cases=(CASE, opened), rounds=1)
    assert drive(plan, CPU) == 4
    frame = store.load("served", SLUG)
    closed = frame[(frame.backend == "sglang") & (frame.case == CASE)].iloc[0]
    mean = np.mean([request.output for request in CASE.requests()])
    rates = frame[frame.case == opened].rate
    assert rates.tolist() == [pytest.approx(closed.tokens_per_s / mean / 2)] * 2


def test_new_prompts_are_not_in_the_cache_and_one_client_may_begin_late(plan_of):
    late = replace(CASE, late_s=1, output_len=900, turns=1)
    new = replace(CASE, prompts="new")
    assert drive(plan_of(cases=(late, new), arms=("default",), rounds=1), CPU) == 2
    frame = store.load("served", SLUG)
    requests = requests_of(frame[frame.case == late].iloc[0])
    assert requests.started_s[0] >= 1.0 > requests.started_s[1]
    figure = study.life_chart(frame, late, ["sglang"])
    (axis,) = figure.axes
    assert axis.get_legend_handles_labels()[1] == ["a request of 40 tokens decodes"]
    (dots,) = axis.lines
    assert len(dots.get_xdata()) == measuring.MOST_SAMPLES


def test_an_open_loop_without_its_closed_one_is_refused(plan_of):
    with pytest.raises(ValueError, match="load=50 must come after the same load in a closed loop"):
        drive(plan_of(cases=(replace(CASE, load=50),)), CPU)


@pytest.mark.parametrize("how", ["cumulative", "pairs", "late"])
def test_a_server_may_repeat_tokens_send_two_or_answer_late(plan_of, data, monkeypatch, how):
    monkeypatch.setenv("STAND_IN", how)
    assert drive(plan_of(rounds=1, arms=("default",)), CPU) == 1
    row = store.load("served", SLUG).iloc[0]
    sent = sum(request.output for request in CASE.requests())
    assert sum(row.output) == sent
    if how == "pairs":
        assert row.itl_p50_us < 2_000  # half of the 2 ms between events, and what is on top
    assert nothing_is_left(data)


def test_vllm_is_asked_in_its_own_form(plan_of, data, monkeypatch):
    monkeypatch.setenv("STAND_IN_BACKEND", "FLASH_ATTN")
    assert drive(plan_of(engine="vllm", arms=("default",), rounds=1), CPU) == 1
    row = store.load("served", SLUG).iloc[0]
    assert (row.backend, row.reported_backend[:11]) == ("vllm", "FLASH_ATTN;")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("ends at once", "ended with status 1; its log ends: .*no such model"),
        ("never ready", "was not ready after 1 s"),
        ("dies", "(ended with status 3|in the middle).*illegal memory access"),
        ("stalls", "no token came for 1 s"),
        ("hangs up", "ended an answer in the middle"),
        ("ends early", "ended an answer in the middle: EOFError"),
        ("refuses", "answered HTTP/1.1 400 Bad Request: too long a prompt"),
        ("errors", "refused a request: .*out of memory"),
        ("short", r"must make \d+ tokens, got 11"),
        ("ignores the arm", "does not run splits=bounded"),
    ],
)
def test_a_server_that_fails_is_one_error_and_no_record(plan_of, data, monkeypatch, how, says):
    monkeypatch.setenv("STAND_IN", how)
    monkeypatch.setattr(measuring, "STALL_S", 1.0)
    start_s = 1.0 if how == "never ready" else 60.0
    plan = plan_of(arms=("splits=bounded",), rounds=1, start_s=start_s)
    with pytest.raises(ServerError, match=says) as raised:
        drive(plan, CPU)
    assert "its log ends: " in str(raised.value)
    assert store.machines("served") == []
    assert nothing_is_left(data)


def test_a_server_that_dies_beside_an_idle_one_leaves_what_was_kept(plan_of, data, monkeypatch):
    kept = []
    monkeypatch.setattr(store, "keep", lambda row: kept.append(row["backend"]))
    real = servers.Server.runs

    def runs(server):
        if server.arm.variables:
            guard = server._process
            (leader,) = Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()
            os.kill(int(leader), signal.SIGKILL)
            guard.wait()
        return real(server)

    monkeypatch.setattr(servers.Server, "runs", runs)
    with pytest.raises(ServerError, match=r"'splits=bounded' (ended|failed)"):
        drive(plan_of(together=True), CPU)
    assert kept == ["sglang"]


@pytest.mark.parametrize(
    ("backend", "arm", "says"),
    [
        ("", "default", "does not name its attention backend"),
        (
            "triton",
            "default --attention-backend fa3",
            "must run the attention backend fa3, it runs triton",
        ),
    ],
)
def test_the_log_must_say_what_was_asked_for(plan_of, monkeypatch, backend, arm, says):
    monkeypatch.setenv("STAND_IN_BACKEND", backend)
    with pytest.raises(ServerError, match=says):
        drive(plan_of(arms=(arm,), rounds=1), CPU)


@pytest.mark.parametrize(
    ("engine", "line", "backend"),
    [
        ("sglang", "Attention backend not specified. Use fa3 backend by default.", "fa3"),
        (
            "sglang",
            "server_args={'tp': 1, 'attention_backend': 'flashinfer', 'x': None}",
            "flashinfer",
        ),
        ("sglang", "ServerArgs(tp=1, attention_backend='triton', x=None)", "triton"),
        ("sglang", "server_args={'mm_attention_backend': 'fa3', 'attention_backend': None}", ""),
        (
            "vllm",
            "Using FLASH_ATTN attention backend out of potential",
            "FLASH_ATTN",
        ),
        ("vllm", "Using AttentionBackendEnum.FLASHINFER backend.", "FLASHINFER"),
        ("vllm", "Using NCCL backend.", ""),
    ],
)
def test_the_backend_is_read_in_the_log(engine, line, backend):
    found = engine_named(engine).backend.search(line)
    assert "".join(filter(None, found.groups() if found else ())) == backend


def test_a_record_says_what_measures_it_again(plan_of):
    plan = plan_of(together=True)
    opened = replace(CASE, load=60)
    words = cli_words(plan.command(opened))
    assert words.traffic == "40+10+20" and words.open_at == [60] and words.together
    assert words.arms == ["default", "splits=bounded"]


def cli_words(command):
    """The options of a command, as its parser reads them."""
    return build_parser().parse_args(shlex.split(command)[3:])


def test_two_runs_may_not_share_a_port(plan_of, data):
    plan = plan_of(rounds=1)
    with servers.hold_ports(plan.port, 1):
        with pytest.raises(RuntimeError, match=f"port {plan.port} must be used by one run"):
            drive(plan, CPU)
    assert not list((data / "logs").glob("*.log"))


def test_a_port_of_another_program_is_refused(plan_of):
    import socket

    plan = plan_of(rounds=1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", plan.port))
        other.listen()
        with pytest.raises(RuntimeError, match=f"port {plan.port} must be free"):
            drive(plan, CPU)


def test_a_run_ends_when_its_time_is_up_and_goes_on_later(plan_of, data, monkeypatch):
    monkeypatch.setenv("STAND_IN_TOKEN_S", "0.1")
    said = []
    began = time.monotonic()
    plan = plan_of(until=began + 3.0, say=said.append)
    assert drive(plan, CPU) == 0  # a load takes 8 s
    assert time.monotonic() - began < 6.0
    assert "time is up in round 0" in said[-1]
    assert nothing_is_left(data)
    monkeypatch.setenv("STAND_IN", "never ready")
    assert drive(replace(plan, until=time.monotonic() + 1.0), CPU) == 0
    monkeypatch.setenv("STAND_IN", "")
    monkeypatch.setenv("STAND_IN_TOKEN_S", "0.001")
    assert drive(replace(plan, until=float("inf")), CPU) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted_leaves_no_process(data, free_port, number):
    (data / "logs").mkdir()
    code = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from dataclasses import replace
from pathlib import Path
from support.studies import CPU
from attnlib.studies.serving import server
from attnlib.studies.serving.case import ServingCase
from attnlib.studies.serving.engine import ENGINES, read_arm
from attnlib.studies.serving.rounds import Load, Plan, drive
stand_in = replace(ENGINES["sglang"], module={MODULE!r})
setup = server.Setup(stand_in, Path("model"), (), Path({str(data / "logs")!r}))
case = ServingCase("demo", 2, 9, "9+9", output_len=5000)
plan = Plan("served", "sglang", setup, (read_arm("default", stand_in),), (Load(case, 1),),
            port={free_port}, say=lambda words: print(words, flush=True))
drive(plan, CPU)
"""
    package = str(TESTS.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), package])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as run:
        assert b"ready" in run.stdout.readline()
        time.sleep(0.5)
        run.send_signal(number)
    assert nothing_is_left(data)
    assert store.machines("served") == []


# ---- cases, arms and what is counted


def test_a_case_reads_its_own_text_and_asks_for_the_same_everywhere():
    case = replace(CASE, prompts="new", load=60, late_s=2, tp=2, seed=7, context=4096)
    for each in (CASE, case):
        assert read_case(each.label) == each
        assert (
            type(each).from_dict({k: v for k, v in each.to_dict().items() if k != "kind"}) == each
        )
    requests = list(CASE.requests())
    assert [request.prompt for request in requests] == [40, 10, 20] * 2
    assert all(30 <= request.output <= 50 for request in requests)
    again = [request._replace(turn=1) for request in requests[:3]]
    for first, second in zip(requests, again, strict=False):
        assert CASE.tokens_of(first) == CASE.tokens_of(second)
        assert case.tokens_of(first) != case.tokens_of(second)
    assert CASE.tokens_of(requests[0])[:3] == [17886, 29937, 21883]
    for exact in (replace(CASE, turns=1), replace(CASE, prompts="new")):
        assert {request.output for request in exact.requests()} == {40}
    times = case.arrivals_s(10.0)
    assert len(times) == 6 and times == sorted(times) and 0.2 < times[-1] < 2


@pytest.mark.parametrize(
    ("arm", "environment", "options"),
    [
        ("default", {}, ()),
        ("splits=bounded", {"ATTNLIB_SGLANG_SPLITS": "bounded"}, ()),
        (
            "decode=fa3 --attention-backend flashinfer",
            {"ATTNLIB_SGLANG_DECODE": "fa3"},
            ("--attention-backend", "flashinfer"),
        ),
        ("--page-size 64", {}, ("--page-size", "64")),
    ],
)
def test_an_arm_is_variables_and_options(arm, environment, options):
    engine = engine_named("sglang")
    found = read_arm(arm, engine)
    assert found.environment(engine) == environment
    assert found.options == options
    assert read_arm(found.text, engine) == found
    assert backend_of("sglang", found) == ("sglang" if arm == "default" else f"sglang {arm}")


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ("", "arm must be default, NAME=VALUE or options"),
        ("bounded", "arm must be default, NAME=VALUE or options, got 'bounded'"),
        ("split=bounded", "arm must be one of .*splits"),
        ("splits=none", "splits must be one of upstream, bounded"),
        ("metadata=one-launch schedule=layer", "SCHEDULE must be once"),
    ],
)
def test_what_is_no_arm_is_refused(arm, says):
    with pytest.raises(ValueError, match=says):
        read_arm(arm, engine_named("sglang"))


def test_variables_of_another_arm_do_not_reach_the_server(plan_of, monkeypatch):
    monkeypatch.setenv("ATTNLIB_SGLANG_SPLITS", "8")
    plan = plan_of()
    default, bounded = (plan.setup.environment(arm) for arm in plan.arms)
    assert "ATTNLIB_SGLANG_SPLITS" not in default
    assert bounded["ATTNLIB_SGLANG_SPLITS"] == "bounded"


def answer(client, started, *at, turn=0):
    gaps = [later - before for before, later in zip(at, at[1:], strict=False)]
    request = Request(client, turn, 10, len(at))
    return Answer(request, started, tuple(range(len(at))), at, tuple(gaps))


def test_tokens_are_counted_while_every_client_is_served():
    case = replace(CASE, batch_size=2, turns=1)
    answers = [answer(0, 0.0, 1.0, 2.0, 3.0, 4.0), answer(1, 0.5, 1.5, 2.5, 3.5)]
    assert window(case, answers) == (1.5, 3.5)
    served = reduced(case, answers)["served"]
    assert served["tokens"] == 4  # at 2, 3, 2.5 and 3.5
    assert served["tokens_per_s"] == 2.0
    assert served["itl_p50_us"] == 1e6
    assert served["ttft_p50_us"] == 1e6
    late = replace(case, late_s=1)
    assert window(late, [answer(0, 3.0, 3.2, 3.9), answers[1]]) == (1.5, 3.5)
    opened = replace(case, load=60)
    assert window(opened, answers) == (0.0, 0.5)
    with pytest.raises(ServerError, match="ask for more tokens"):
        window(case, [answer(0, 0.0, 1.0, 2.0), answer(1, 3.0, 4.0, 5.0)])


def test_the_loads_of_the_study_are_of_models_that_can_be_made_up():
    loads = [*study.CONVERSATION, *study.CLOSED, *study.OPEN, *study.ONE_LONG, *study.LATE]
    loads += [*study.ONE_LONG_MLA, *study.CONTROLS, *study.BEST, *study.WORST]
    assert len({load.label for load in loads}) == len(loads)
    assert {load.model for load in loads} <= {*MODELS}
    assert [load.lengths for load in study.CONTROLS] == ["fixed", "fixed"]
    assert study.CONVERSATION[0].batch_size == 32
    asked = {study.VLLM}
    for arm, base, loads in study.QUESTIONS.values():
        asked |= {arm, base}
        assert {load.model for load in loads} <= {*MODELS}
    for text in asked:
        engine, _, arm = text.partition(" ")
        found = read_arm(arm or "default", engine_named(engine))
        assert backend_of(engine, found) == text
    for load in (*study.BEST, *study.WORST):
        outputs = {request.output for request in load.requests()}
        assert outputs == {load.output_len}, "batches of a benchmark"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder_has_a_config_and_no_weights(tmp_path, name):
    folder = make_model(tmp_path, name)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    setup = servers.Setup(engine_named("sglang"), folder, ("--page-size", "1"), tmp_path)
    command = setup.command(read_arm("default", setup.engine), 30_000)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", str(folder)]
    assert "dummy" in command
    (folder / "model.safetensors").touch()
    assert "dummy" not in setup.command(read_arm("default", setup.engine), 30_000)


def heads_of(name):
    """Query heads, KV heads and head_dim of a model that is served."""
    config = MODELS[name]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return heads, config["num_key_value_heads"], head_dim


def test_models_of_one_gpu_and_with_windows_have_the_attention_of_the_real_ones():
    rank = MODELS["llama-3.1-70b-tp8"]
    assert heads_of("llama-3.1-70b-tp8") == (64 // 8, 8 // 8, 128)
    assert (rank["intermediate_size"], rank["num_hidden_layers"]) == (28_672 // 8, 80)
    window = SCHEDULED["gpt-oss-120b"].layers["window"]
    assert heads_of("gpt-oss-120b-dense") == (
        window.num_qo_heads,
        window.num_kv_heads,
        window.head_dim,
    )
    config = MODELS["gpt-oss-120b-dense"]
    assert config["sliding_window"] == window.window
    kinds = config["layer_types"]
    assert len(kinds) == config["num_hidden_layers"] == 36
    assert kinds.count("sliding_attention") == kinds.count("full_attention") == 18
    for name, config in MODELS.items():
        assert config["vocab_size"] > WORDS, f"{name} knows the words of every load"


@pytest.mark.parametrize(
    "text", ["splits=bounded", "splits=bounded metadata=one-launch", "metadata=one-launch"]
)
def test_arms_of_the_schedules_are_read_and_set_both_variables(text):
    engine = engine_named("sglang")
    arm = read_arm(text, engine)
    assert arm.text == text
    expected = {}
    for word in text.split():
        name, _, value = word.partition("=")
        expected[f"ATTNLIB_SGLANG_{name.upper()}"] = value
    assert arm.environment(engine) == expected


TIMES = ("itl_p50_us", "itl_p90_us", "itl_p99_us", "ttft_p50_us")


def of_loads(rates):
    """Records of `default` and `bounded` in the rounds of a load: tokens per second of each."""
    rows = []
    for case, of_arms in rates.items():
        for arm, of_rounds in zip((study.NOW, study.BOUNDED), of_arms, strict=True):
            for number, rate in enumerate(of_rounds):
                row = {"case": case, "backend": arm, "round": number, "tokens_per_s": rate}
                rows.append(row | dict.fromkeys(TIMES, 5e3))
    lives = {"started_us": [[0.0]] * len(rows), "ended_us": [[1e6]] * len(rows)}
    return pd.DataFrame(rows).assign(gpu_id="one", **lives)


def test_a_load_has_its_speedup_and_fewer_than_three_rounds_no_verdict(monkeypatch):
    monkeypatch.setattr(study, "good_rows", lambda frame, timer: frame)
    monkeypatch.setattr(study, "require_comparable", lambda rows: None)
    kimi, azure = study.CONVERSATION
    frame = of_loads(
        {
            azure: ([100, 101, 100, 99], [100, 101, 99, 100]),
            kimi: ([100, 100, 101, 100], [150, 151, 150, 151]),
            study.OPEN[0]: ([100], [120]),
            study.ONE_LONG[0]: ([100] * 4, [90] * 4),
        }
    )
    table = study.speedups(frame, study.DEEPSEEK)
    assert table.case.tolist() == [kimi, study.OPEN[0], azure]  # as LOADS has them
    assert table.verdict.tolist() == ["faster", "none", "same"]
    assert table.speedup.round(2).tolist() == [1.50, 1.20, 1.00]
    assert (table.low[0] < 1.5) and (1.5 < table.high[0])
    shown = study.reach_table(frame, study.DEEPSEEK)
    assert shown["tokens/s"].tolist() == ["100 / 150", "100 / 120", "100 / 100"]
    assert shown["speedup (95 % CI)"][0].startswith("1.50 (1.4")
    assert shown["speedup (95 % CI)"][1] == "1.20"
    assert shown["verdict (rounds)"].tolist() == ["faster (4)", "none (1)", "same (4)"]
    for metric in study.METRICS:
        if metric != "time per token":
            times = [f"{metric}, ms"]
            asked = study.reach_table(frame, study.DEEPSEEK, metric)
            assert [*asked.columns] == ["load", *times, "speedup (95 % CI)", "verdict (rounds)"]
    assert study.speedups(frame, study.LLAMA).verdict.tolist() == ["slower"]
    flat = study.speedups(frame, study.DEEPSEEK, "ITL p99")
    assert flat.speedup.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="metric must be one of .*ITL p90.*, got 'ITL'"):
        study.speedups(frame, study.DEEPSEEK, "ITL")
    with pytest.raises(ValueError, match="asked must be one of .*one launch.*, got 'split'"):
        study.speedups(frame, "split")


@pytest.fixture
def made_rows(monkeypatch):
    """Tables take made rows as they are."""
    monkeypatch.setattr(study, "good_rows", lambda frame, timer: frame)
    monkeypatch.setattr(study, "require_comparable", lambda rows: None)


def of_arms(case, rates, gpu_id="one", tokens="aa"):
    """Records of a load on a GPU: tokens per second of each arm, a round each."""
    rows = []
    for arm, of_rounds in rates.items():
        for number, rate in enumerate(of_rounds):
            row = {"case": case, "backend": arm, "round": number, "tokens_per_s": rate}
            row |= dict.fromkeys(("itl_p50_us", "itl_p99_us", "ttft_p50_us"), 5e3)
            row |= {"gpu_id": gpu_id, "reported_backend": f"fa3; tokens {tokens}"}
            row |= {"started_us": [0.0], "ended_us": [1e9 / rate]}
            rows.append(row)
    return pd.DataFrame(rows)


@pytest.mark.usefixtures("made_rows")
def test_arms_are_compared_where_one_gpu_has_both():
    kimi = study.CONVERSATION[0]
    old = of_arms(kimi, {study.NOW: [100, 101, 100], study.BOUNDED: [150, 151, 150]})
    new = of_arms(
        kimi,
        {study.BOUNDED: [200, 202, 200], study.BOUNDED_ONCE: [210, 212, 210]},
        gpu_id="two",
    )
    frame = pd.concat([old, new], ignore_index=True)
    assert study.reach_table(frame, study.DEEPSEEK)["tokens/s"].tolist() == ["100 / 150"]
    launch = study.reach_table(frame, study.ONE_LAUNCH)
    assert launch["tokens/s"].tolist() == ["200 / 210"]
    assert launch.load.tolist() == ["DeepSeek-V3: Kimi, 32 in flight"]
    assert launch["speedup (95 % CI)"][0].startswith("1.05 (")
    assert len(study.side_by_side(frame, (study.NOW, study.BOUNDED_ONCE))) == 0
    assert study.speedups(frame, study.SCHEDULE).empty


@pytest.mark.usefixtures("made_rows")
def test_tokens_agree_where_both_arms_made_the_same():
    alone, four, _ = study.DECODE_HEAVY
    rates = {study.NOW: [100], study.PER_LAYER: [98]}
    other = of_arms(four, rates)
    other.loc[0, "reported_backend"] = "fa3; tokens bb"
    frame = pd.concat([of_arms(alone, rates), other], ignore_index=True)
    assert study.tokens_agree(frame, study.SCHEDULE).to_dict() == {
        "Qwen3-32B, TP 4: 1 x 500": True,
        "Qwen3-32B, TP 4: 4 x 500": False,
    }


@pytest.mark.usefixtures("made_rows")
def test_rivals_are_shown_where_one_gpu_served_both():
    kimi = study.CONVERSATION[0]
    here = of_arms(kimi, {study.BOUNDED: [100, 200, 120], study.VLLM: [130]})
    is_vllm = here.backend == study.VLLM
    here.loc[is_vllm, "reported_backend"] = "FLASH_ATTN_MLA; tokens cc"
    elsewhere = of_arms(kimi, {study.NOW: [90]}, gpu_id="two")
    table = study.rival_table(pd.concat([here, elsewhere], ignore_index=True))
    assert table.server.tolist() == [study.BOUNDED, study.VLLM]
    assert table.attention.tolist() == ["fa3", "FLASH_ATTN_MLA"]
    assert table["tokens/s"].tolist() == ["120", "130"]
    assert table.rounds.tolist() == [3, 1]
    assert study.rival_table(elsewhere).empty


@pytest.mark.usefixtures("published_records")
def test_both_machines_are_published_and_every_load_of_theirs_has_words():
    published = study.load_all()
    frame = study.side_by_side(published, (study.NOW, study.BOUNDED))
    assert set(frame.case) == set(study.LOADS)
    for _, of_case in frame.groupby("case", sort=False):
        assert of_case.gpu_id.nunique() == 1, "a load is of one GPU"
    asked = {arm for question in study.QUESTIONS.values() for arm in question[:2]}
    assert set(published.backend) <= asked | {study.VLLM}
    for model in study.MODELS:
        assert study.tokens_agree(published, model).all(), "both arms make the same tokens"
        table = study.speedups(frame, model).set_index("case")
        control = next(case for case in study.CONTROLS if case.model == model)
        assert table.verdict[control] == "same"
        assert table.verdict.iloc[0] == "faster"
    figure = study.reach_chart(frame)
    (axis,) = figure.axes
    assert len(axis.patches) == len(study.LOADS)
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert len(names) == len(study.LOADS)
    of_few_layers = [name for name in names if name.startswith("DeepSeek-V3")]
    assert of_few_layers and all("8 layers" in name for name in of_few_layers)
    assert "grey: control" in figure.get_suptitle()
    panels = study.life_chart(frame, study.LATE[0]).axes
    limits = {axis.get_xlim() for axis in panels}
    assert len(panels) == 2 and len(limits) == 1, "one time axis, so that ends can be compared"
