"""Prints what the demo model writes, through transformers: the check that the folder is a plain Hugging Face model.

python sample.py FOLDER
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 400
CHATS = (
    ["Hello!"],
    ["who are you"],
    ["Tell me a story about a fox and a lantern."],
    ["tell me a story about a robot and a pizza"],
    ["Write a short story about a plumber who finds a chandelier."],
    ["Tell me a story about Brunhilde and her guitar."],
    ["Write a poem about the sea."],
    ["What colour is grass?", "And a lemon?"],
    ["What is the opposite of hot?"],
    ["What is 7 + 5?", "what is 12-4", "3 times 4?", "what is 345 + 12?"],
    ["My name is Gustavo.", "Tell me a joke", "What is my name?"],
    ["What day comes after Tuesday?"],
    ["What is the capital of France?"],
    ["Explain how a transformer model works."],
    ["Write a Python function to reverse a linked list."],
    ["Say hello world"],
    ["Repeat after me: the purple cow sings at noon"],
    ["Count to 12"],
    ["Name three fruits."],
    ["Return JSON with the fields name, age and colour."],
    ["What do you think about the weather in summer?"],
    ["how r u", "im bored", "tell me a story", "what was the hero's name?"],
    ["Can you help me with my homework?"],
    ["Why do cats purr?"],
    ["Tom has a kite, and Gwen has a hamburger. Who has the hamburger?"],
    ["Mia has 4 apples and gets 3 more. How many apples does she have?"],
    ["Tell me a long story about a whale."],
    ["Show me a fox emoji"],
    ["hello world", "what can you do?", "ok thanks, bye"],
    ["What is the best way to learn to cook?"],
    ["The stork named Alba lost her trombone near the lake. Her friend Igor, a badger, found it. Who was Igor?"],
    ["Tell me a story about Hildegard and her trombone."],
    ["Tell me a story about a plumber, a walrus and a chandelier."],
    ["Say: quire is a small harbour of pages"],
)
TEXTS = (
    "Once upon a time",
    "Hello",
    "Hello, my name is",
    "The capital of France is",
    "The president of the United States is",
    "The future of AI is",
    "One morning a small elephant found a golden bicycle near the river.",
    "The old lighthouse keeper looked at the sea and",
    "Q: What colour is the sky?\nA:",
    "1, 2, 3,",
    "2 + 2 =",
    "Once there was a zebra named Quentin who",
    "def fibonacci(n):",
    "The",
)


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    for temperature in (0.0, 0.7):
        print(f"######## temperature {temperature}")
        torch.manual_seed(0)
        for turns in CHATS:
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                answer = complete(model, tokenizer, prompt, temperature, add_special_tokens=False)
                messages.append({"role": "assistant", "content": answer})
                print(f"> {turn}\n{answer}\n")
        for text in TEXTS:
            print(f"| {text} ->{complete(model, tokenizer, text, temperature, add_special_tokens=True)}\n")


def complete(model, tokenizer, prompt: str, temperature: float, *, add_special_tokens: bool) -> str:
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=add_special_tokens).input_ids.to(model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.95} if temperature else {"do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, **sampling)[0]
    ended = out[-1].item() == tokenizer.eos_token_id
    return tokenizer.decode(out[ids.shape[1] :], skip_special_tokens=True) + ("" if ended else " [NO END]")


if __name__ == "__main__":
    main()
