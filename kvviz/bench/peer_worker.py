"""Runs kvpress for the benchmark. Started by the peer's own Python, which has neither kvviz nor its transformers.

Reads one JSON request a line from standard input and writes one JSON answer a line. It uses kvpress as its README does: the
text-generation pipeline with a press, greedy.
"""

import json
import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"


def presses():
    """Our policy names -> kvpress presses of a compression ratio."""
    import kvpress

    return {
        "sink": lambda r: kvpress.StreamingLLMPress(compression_ratio=r, n_sink=4),
        "knorm": lambda r: kvpress.KnormPress(compression_ratio=r),
        "keydiff": lambda r: kvpress.KeyDiffPress(compression_ratio=r),
        "expected_attention": lambda r: kvpress.ExpectedAttentionPress(compression_ratio=r, epsilon=0.0),
        "snapkv": lambda r: kvpress.SnapKVPress(compression_ratio=r, window_size=32),
        "tova": lambda r: kvpress.TOVAPress(compression_ratio=r),
        "adakv": lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=r, window_size=32)),
        "random": lambda r: kvpress.RandomPress(compression_ratio=r),
    }


def main() -> None:
    """Load the model, then serve requests until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print must not meet the answers
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    model = AutoModelForCausalLM.from_pretrained(setup["folder"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = [-1]  # write the full length
    tokenizer = PreTrainedTokenizerFast.from_pretrained(setup["folder"])
    pipeline = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    made = presses()
    print(json.dumps({"kvpress": getattr(kvpress, "__version__", "")}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            press = made[request["policy"]](request["ratio"])
            began = time.perf_counter()
            result = pipeline(
                setup["context"], question=setup["question"], press=press, max_new_tokens=request["max_new_tokens"]
            )
            answer = {"seconds": time.perf_counter() - began, "text": result["answer"]}
        except Exception as error:  # whatever kvpress raises is the benchmark's news
            answer = {"error": f"{request}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
