"""Write `smollm2_greedy.json`: what `transformers` generates greedily, in float32, prompt by
prompt, from SmolLM2-135M-Instruct. Run again only if the built-in checkpoint changes.

    python tests/data/make_smollm2_greedy.py
"""

import json
from pathlib import Path

import torch
import transformers

from minivllm.checkpoint.hub import resolve_model
from minivllm.tokenizer import load_tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "한국의 수도는 어디인가요?",
    "def fibonacci(n):  # finish this function",
    "List the numbers from 1 to 12, separated by commas.",
    "Explain what a cache is, to a child. " * 6,
    "👩‍👩‍👧‍👦 What does this emoji show?",
    "Name three animals that can fly.",
)
NUM_TOKENS = 64
SECOND_TURN = "<|im_end|>\n<|im_start|>user\nSay it shorter.<|im_end|>\n<|im_start|>assistant\n"
NUM_SECOND_TOKENS = 24


@torch.inference_mode()
def generate(model, prompt_ids, num_tokens):
    """The greedy continuation, end-of-sequence tokens or not.

    A plain loop: `model.generate` would take the end token, which is its padding token too, for
    padding and mask it.
    """
    token_ids, fresh, cache = [], prompt_ids, None
    for _ in range(num_tokens):
        output = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        fresh, cache = [int(output.logits[0, -1].argmax())], output.past_key_values
        token_ids += fresh
    return token_ids


def main():
    path = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    records = []
    for question in QUESTIONS:
        prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        record = {"prompt": prompt_ids, "answer": generate(model, prompt_ids, NUM_TOKENS)}
        records.append(record)
        if len(records) <= 2:
            turn = tokenizer.encode(SECOND_TURN, parse_special=True)
            record["second_prompt"] = prompt_ids + record["answer"] + turn
            record["second_answer"] = generate(model, record["second_prompt"], NUM_SECOND_TOKENS)
        print(tokenizer.decode(record["answer"]), flush=True)
    lines = ",\n ".join(json.dumps(record) for record in records)
    Path(__file__).with_name("smollm2_greedy.json").write_text(f"[{lines}]\n")


if __name__ == "__main__":
    main()
