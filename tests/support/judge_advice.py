"""Judge `advise` on calls of layers that no record has: draw them, measure them, judge once.

    PYTHONPATH=tests python -m support.judge_advice draw ["SEED"]      64 calls, a line each; no GPU
    PYTHONPATH=tests python -m support.judge_advice warm               compile FlashInfer's modules
    PYTHONPATH=tests python -m support.judge_advice measure OUT --seconds N
    PYTHONPATH=tests python -m support.judge_advice judge OUT          no GPU

`warm` records nothing and may run beside other work. `measure` times each call by every backend of
`ENGINES` (tests/lab/test_unseen_batches.py) that the environment can run: cold L2 in a CUDA graph,
checked by the oracle, call by call. Given again, it measures what OUT lacks, so environments that
have other libraries add to the same OUT; rows of another GPU do not count. `judge` takes the calls
that every backend which can run them has, prints the lines of `OUTCOMES`, and appends the calls
with `"judged": 2` to data/captures/unseen_batches.jsonl.

A row of OUT: call, backend, status, reason, us (median), samples_us, oracle_error, gpu, gpu_id,
versions, date.
"""
