"""Fifty varied prompts: (kind, text) or, for the chat template, (kind, messages). Imports nothing of octavo."""

from __future__ import annotations

NATURAL = [
    "The capital of France is",
    "Once upon a time, in a land far away, there lived",
    "Water boils at 100 degrees Celsius because",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "In 1969, the first human being to walk on the Moon",
    "My favourite book is about a young woman who",
    "The stock market fell sharply on Monday after",
    "To bake a good loaf of bread, you first need to",
    "The difference between a virus and a bacterium is that",
    "Dear Sir or Madam,\n\nI am writing to apply for the position of",
    "It was the best of times, it was the worst of times,",
    "A neural network learns by",
    "The Pacific Ocean is the largest",
    "Roses are red, violets are blue,",
    "The train left the station at half past six and",
]
CODE = [
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, x):\n",
    "<html>\n<head><title>",
    "function debounce(f, ms) {\n  let timer;\n",
    '{"name": "octavo", "version": "1.0", "dependencies": {',
    "for i in range(10):\n    if i % 3 == 0:\n\t\tprint(i)\n",
    "fn main() {\n    let v: Vec<i32> = ",
]
SCRIPTS = [
    "你好，世界！今天天气",
    "中华人民共和国的首都是",
    "日本の首都は",
    "Привет, как дела?",
    "Bonjour, je m'appelle",
    "Die Hauptstadt von Deutschland ist",
    "مرحبا بالعالم",
    "안녕하세요, 저는",
    "🎉🎂 Happy birthday! 🥳",
    "I love 🍕 and 🍣, but my favourite food is 🌮 because",
    "👩‍👩‍👧‍👦 families are",
    "Ελλάδα είναι",
]
ODD = [
    "a",
    " ",
    "\n\n\n",
    "1, 2, 3, 4, 5,",
    "3.14159265358979",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The the the the the the",
    "    indented    text   with      spaces",
]
CHAT = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What colour is the sky?"},
    ],
    [
        {"role": "user", "content": "Hi, I'm Ada."},
        {"role": "assistant", "content": "Hello Ada, nice to meet you!"},
        {"role": "user", "content": "What is my name, and what is 7 times 6?"},
    ],
]
STORY = (
    "The lighthouse keeper climbed the stairs every evening, counted the ships on the horizon and wrote their names "
    "in a leather book that his grandfather had given him. On the night of the great storm he counted none, and yet, "
    "when the wind fell silent towards morning, there were voices on the rocks below. "
)
LONG = [STORY * 3, STORY * 28]  # the second has more than 1,500 tokens


def prompts() -> list[tuple[str, str | list[dict[str, str]]]]:
    kinds = {"natural": NATURAL, "code": CODE, "scripts": SCRIPTS, "odd": ODD, "chat": CHAT, "long": LONG}
    return [(kind, text) for kind, texts in kinds.items() for text in texts]
