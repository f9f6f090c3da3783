"""`make gpu`: parts side by side, a limit for each, and what is written when one fails."""

import json
import time

import pytest
from support import live_run

GOOD = "print('.. 2 passed')\nprint('2 passed, 1 skipped in 0.10s')"
LOCKS = "import os\nprint(os.environ.get('ATTNLIB_LOCKS', 'shared'))\nprint('1 passed in 0.10s')"
BAD = "print('1 failed, 3 passed in 0.10s')\nraise SystemExit(1)"
ENDLESS = """\
import subprocess, sys, time
print("began", flush=True)
subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Scripts in place of test files, on a machine with a GPU; gives the run's summary file."""
    for name, text in (("good", GOOD), ("bad", BAD), ("endless", ENDLESS), ("locks", LOCKS)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(live_run.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(live_run, "identify_gpu", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(live_run, "parts", lambda: ["good.py", "bad.py", "endless.py", "locks.py"])
    monkeypatch.setattr(live_run, "PYTEST", [])
    monkeypatch.setattr(live_run, "BUILD", tmp_path / "build")
    monkeypatch.setattr(live_run, "LOGS", tmp_path / "build" / "logs")
    monkeypatch.setattr(live_run, "compare_claims", lambda: "all claims")
    monkeypatch.delenv("ATTNLIB_LOCKS", raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prices.csv").write_text("1")
    return tmp_path / "data" / "live_run.json"


def read(path):
    """The summary, and its parts by name."""
    summary = json.loads(path.read_text())
    return summary, {part["part"]: part for part in summary["parts"]}


def test_a_part_past_its_limit_ends_and_the_others_are_written_and_not_run_again(parts, capsys):
    started = time.monotonic()
    assert live_run.main(["--limit", "3", "--workers", "4"]) == 1
    assert time.monotonic() - started < 30
    summary, ran = read(parts)
    assert summary["left"] == [] and summary["agrees"] == "all claims"
    assert (ran["good.py"]["passed"], ran["good.py"]["skipped"]) == (2, 1)
    assert ran["good.py"]["failed"] == 0
    assert (ran["bad.py"]["failed"], ran["bad.py"]["passed"]) == (1, 3)
    assert ran["endless.py"]["reason"] == "not done after 3 s: began"
    printed = capsys.readouterr().out
    assert "s  good.py: ok" in printed and "s  endless.py: FAILED: not done" in printed

    assert live_run.main(["--limit", "1"]) == 1
    again = capsys.readouterr().out
    assert "bad.py" in again and "good.py" not in again


def test_only_parts_side_by_side_have_locks_of_their_own(parts):
    live_run.main(["locks.py"])
    log = parts.parents[1] / "build" / "logs" / "locks.log"
    assert (log.parents[1] / "data" / "prices.csv").exists(), "a page reads more than records"
    assert log.read_text().startswith("shared")
    summary, _ = read(parts)
    assert summary["left"] == ["good.py", "bad.py", "endless.py"]
    assert summary["agrees"] == "not compared"
    parts.unlink()
    live_run.main(["--workers", "2", "locks.py"])
    assert log.read_text().startswith(str(log.parent))


def test_notebooks_can_run_alone_and_without_a_gpu_nothing_runs(parts, monkeypatch):
    assert live_run.main(["--notebooks"]) == 0
    assert not parts.exists()
    monkeypatch.setattr(live_run.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="must have a CUDA GPU"):
        live_run.main([])
