"""vLLM by itself on the sampling work of `gpu_grpo.py`: the bar that sampling within a run is held against.

64 prompts of 128 tokens x 8 samples x 512 new tokens, log-probabilities on, the whole batch in one call to vLLM's own
`LLM.generate`. Prints seconds of the start and tokens/s of three calls.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from shapes import make_model, write_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--models", default="/tmp/shapes", help="where the random models are kept")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--seeds", action="store_true", help="a seed for each row")
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--args", default="{}", help="JSON, more of vLLM's own arguments")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    model = make_model(options.shape, Path(options.models))
    file = write_prompts(Path(options.models) / "prompts.jsonl", options.prompts, options.prompt_tokens)
    texts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    begun = time.perf_counter()
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    rows = options.prompts * options.samples
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in texts for _ in range(options.samples)]
    length = options.prompt_tokens + options.new_tokens
    keys = {"max_model_len": length, "max_num_seqs": rows, "gpu_memory_utilization": 0.8}
    llm = LLM(str(model), dtype="bfloat16", **(keys | json.loads(options.args)))
    print(f"start {time.perf_counter() - begun:.1f} s", flush=True)
    sampling = [
        SamplingParams(
            max_tokens=options.new_tokens, ignore_eos=True, logprobs=0, detokenize=False,
            seed=row if options.seeds else None,
        )
        for row in range(rows)
    ]  # fmt: skip
    for _ in range(options.calls):
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        print(f"{seconds:.2f} s, {rows * options.new_tokens / seconds:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
