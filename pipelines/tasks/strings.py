"""String tasks: reverse and count spelled-out letters, capitals, first letters, joining words."""

from __future__ import annotations

import random
import string

from pipelines.tasks.task import Problem
from pipelines.tasks.words import COLOURS, ITEMS, NAMES, form, listed

_SEPARATORS = {"hyphens": "-", "plus signs": "+", "slashes": "/", "underscores": "_"}


def reverse(rng: random.Random) -> Problem:
    spelled = rng.sample(string.ascii_lowercase, rng.randint(3, 6))
    given, back = " ".join(spelled), " ".join(spelled[::-1])
    prompt = form(
        rng,
        (
            "Reverse the letters: {given}.",
            "Write these letters backwards: {given}.",
            "Give the letters {given} from last to first.",
        ),
        given=given,
    )
    answer = f"The letters are {given}.\nThe last letter is {spelled[-1]}.\nBackwards: {back}.\nAnswer: {back}"
    return Problem(tuple(spelled), prompt + " End with 'Answer: a b c'.", answer, "".join(spelled[::-1]))


def uppercase(rng: random.Random) -> Problem:
    words = [rng.choice(COLOURS), rng.choice(ITEMS)][: rng.randint(1, 2)] + rng.sample(ITEMS, 1)
    text, capitals = " ".join(words), " ".join(words).upper()
    prompt = form(
        rng,
        (
            "Write in capital letters: {text}.",
            "Change to upper case: {text}.",
            "How does '{text}' look in capitals?",
        ),
        text=text,
    )
    lines = "".join(f"{word}: {word.upper()}\n" for word in words)
    return Problem(tuple(words), prompt + " End with 'Answer: WORDS'.", f"{lines}Answer: {capitals}", capitals)


def count_letter(rng: random.Random) -> Problem:
    letter, other, third = rng.sample(string.ascii_lowercase, 3)
    spelled = [letter] + [rng.choice((letter, other, third)) for _ in range(rng.randint(3, 5))]
    rng.shuffle(spelled)
    prompt = form(
        rng,
        (
            "How many times is the letter {letter} in {given}?",
            "Count the letter {letter}: {given}.",
            "In {given}, how often does {letter} appear?",
        ),
        letter=letter,
        given=" ".join(spelled),
    )
    total, steps = 0, []
    for one in spelled:
        total += one == letter
        steps.append(f"{one} {total}")
    answer = f"Counting {letter}: {', '.join(steps)}.\nThe letter {letter} appears {total} times.\nAnswer: {total}"
    return Problem((letter, *spelled), prompt + " End with 'Answer: N'.", answer, total)


def first_letters(rng: random.Random) -> Problem:
    words = rng.sample(rng.choice((ITEMS, NAMES)), rng.randint(3, 4))
    prompt = form(
        rng,
        (
            "Take the first letter of each word: {items}.",
            "Which letters do these words begin with: {items}?",
            "Write the first letters of {items}.",
        ),
        items=listed(words),
    )
    first = [word[0] for word in words]
    lines = "".join(f"{word}: {word[0]}\n" for word in words)
    answer = f"{lines}Answer: {' '.join(first)}"
    return Problem(tuple(words), prompt + " End with 'Answer: a b c'.", answer, "".join(first))


def join(rng: random.Random) -> Problem:
    words, name = rng.sample(ITEMS, rng.randint(3, 4)), rng.choice(sorted(_SEPARATORS))
    joined = _SEPARATORS[name].join(words)
    prompt = form(
        rng,
        (
            "Join these words with {name}: {items}.",
            "Write {items} as one text with {name} between the words.",
            "Connect {items} by {name}.",
        ),
        name=name,
        items=listed(words),
    )
    answer = f"The words are {listed(words)}.\nWith {name} between them: {joined}\nAnswer: {joined}"
    return Problem((name, *words), prompt + " End with 'Answer: text'.", answer, joined)
