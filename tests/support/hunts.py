"""Measurements that LOG predicts and no study has: a lane of calls into a file of JSON lines.

    PYTHONPATH=tests python -m support.hunts LANE OUT --seconds N [--rounds 4]
    PYTHONPATH=tests python -m support.hunts show OUT                  ratios and verdicts; no GPU

| lane | what is compared | needs |
|---|---|---|
| caps | vLLM's FlashAttention-3 in a graph with 32 and with 128 splits, one request | vLLM |
| triton-splits | SGLang's Triton decode with 8 and with 32 splits | SGLang |
| gather | EAGLE's gather of the page table over 8,192, 131,072 and 1,048,576 columns | torch |
| traced | host times of a launch and a plan after traces of their process | FlashInfer |
| offsets | FlashInfer 0.6.18 and 0.6.17, pages of 1 and of 16 | FlashInfer, two --overlay |

Four rounds, a fresh process each; odd rounds run in reverse order: A B B A. The same command goes
on where it was stopped. `offsets` takes no OUT: its records are those of the study `suite`.

A row of OUT: lane, round, call, arm, status, reason, us (median), samples_us, oracle_error, gpu,
gpu_id, versions, date; of `traced` plan_us and launch_us by traces before, in place of us.
"""
