"""Steps of transformers' continuous batching, by the arms of `core.engines.hf`."""

import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from ...core.backends.base import installed_version
from ...core.engines import hf
from .serve import VOCABULARY, token_digest

WARM_STEPS = 32
"""Of each run, before those that are taken; prefill and capture come before them."""


class Batching:
    """A model with weights of its own drawing, on one GPU."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.refused, self.starts = "", list[float]()
        try:
            hf.require_release()
        except RuntimeError as error:
            self.refused = str(error)
            return
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
        from transformers.generation.continuous_batching import continuous_api

        self.options = GenerationConfig
        processor = continuous_api.ContinuousBatchProcessor
        own = processor._generation_step

        def timed(batch: Any, model: Any) -> Any:
            self.starts.append(time.perf_counter())
            return own(batch, model)

        processor._generation_step = timed
        torch.manual_seed(0)
        with torch.device("cuda"):
            config = AutoConfig.from_pretrained(setup["model"])
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def measure(self, question: dict[str, Any]) -> dict[str, Any]:
        """By arm, the times between starts of the last steps of two runs, A B B A.

        Its error is of token counts, its hash of all tokens of the last run.
        """
        if self.refused:
            return {"refused": self.refused}
        arms, steps, calls = question["arms"], question["steps"], Counter[str]()
        drawn = np.random.default_rng(0)
        prompts = [drawn.integers(0, VOCABULARY, length).tolist() for length in question["lens"]]
        found: dict[str, dict[str, Any]] = {
            arm: {"error": 0.0, "digest": "", "run_us": []} for arm in arms
        }
        for arm in (*arms, *reversed(arms)):
            with hf.decode(arms[arm]["metadata"]) as counted:
                tokens = self._tokens(prompts, WARM_STEPS + steps)
            calls += counted
            us = np.diff(self.starts[-steps - 1 :]) * 1e6
            missing = sum(len(each) != WARM_STEPS + steps for each in tokens)
            found[arm]["error"] += float(missing)
            found[arm]["digest"] = token_digest(tokens)
            found[arm]["run_us"] += us.tolist()
        said = [f"transformers {installed_version('transformers')}"]
        return {"arms": found, "calls": calls, "said": said}

    def _tokens(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        # Its own test for FlashAttention-3 asks for a distribution's name.
        self.model.config._attn_implementation_internal = "paged|flash_attention_3"
        self.starts.clear()
        options = self.options(max_new_tokens=count, do_sample=False, eos_token_id=-1)
        told = self.model.generate_batch(inputs=prompts, generation_config=options)
        return [told[key].generated_tokens for key in sorted(told)]
