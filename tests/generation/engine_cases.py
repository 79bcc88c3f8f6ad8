"""Small random checkpoints, many prompts, and their tokens by transformers."""

import random

import torch
import transformers

from xla_attention.generation import Engine, Request

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "mistral": transformers.MistralConfig(**COMMON, sliding_window=11),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=32),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=96, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None, tie_word_embeddings=False,
    ),
}  # fmt: skip
# Float32 by two implementations, over two layers: logits differ by less than this.
GAP = 1e-3


def save_checkpoint(name, folder):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)


def random_requests(count, seed=0, longest=60):
    """Greedy, of mixed lengths."""
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        length = draw.choice([1, 2, draw.randint(3, 20), draw.randint(20, longest)])
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(length))
        requests.append(Request(prompt, draw.randint(1, 24)))
    return requests


def expected_tokens(folder, requests):
    """Of each request, transformers' greedy tokens, up to the first that is a near tie.

    Where the two best logits are closer than `GAP`, either token is right; so it and what follows is not
    compared.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = [logits[0].topk(2).values for logits in result.logits]
        sure = next((n for n, (a, b) in enumerate(best) if a - b < GAP), request.max_new_tokens)
        found.append(result.sequences[0, len(request.prompt_ids) :].tolist()[:sure])
    return found


def run_joining_and_leaving(engine, requests, seed=0):
    """Tokens of each request, submitted at random steps, among others that are cancelled at random steps."""
    draw = random.Random(seed)
    waiting, completions, bystanders = list(requests), [], []
    while waiting or any(c.finish_reason is None for c in completions + bystanders):
        for _ in range(draw.choice([0, 0, 1, 1, 3])):
            if waiting:
                completions.append(engine.submit(waiting.pop(0)))
                if draw.random() < 0.25:
                    bystanders.append(engine.submit(draw.choice(requests)))
        engine.step()
        for bystander in bystanders:
            if draw.random() < 0.2:
                engine.cancel(bystander)
    return [c.tokens for c in completions]


def engine_and_tokens(model, requests, **sizes):
    engine = Engine(model, **({"max_seqs": 8, "max_tokens": 32, "page_size": 8} | sizes))
    return engine, run_joining_and_leaving(engine, requests)


def assert_same(tokens, expected):
    for number, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
        assert ours[: len(theirs)] == theirs, f"request {number}"
