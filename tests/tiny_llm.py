"""A tiny random model with a byte-level tokenizer, as a Hugging Face directory."""

import json

from huggingface_writer import llama, write_hf
from tiny_tokenizers import BOS, EOS, TOKENS, byte_level

import contbatch as cb

PROMPTS = [[5, 6, 7] * 6, [9] * 3, "the"]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_tiny(folder, **config):
    ids = {"bos_token_id": TOKENS.index(BOS), "eos_token_id": TOKENS.index(EOS)}
    write_hf(folder, llama(vocab_size=len(TOKENS), **config), **ids)
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def greedy(max_tokens, **changes):
    return cb.SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **changes})


def tokens_of(llm, prompts=PROMPTS, max_tokens=3):
    return [o.token_ids for o in llm.generate(prompts, greedy(max_tokens, stop=("never",)), progress=False)]


def ran(llm, prompts=PROMPTS):
    requests = llm.requests(prompts, greedy(5))
    assert len(llm.run(requests).requests) == len(prompts)
    return requests
